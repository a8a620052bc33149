"""Megatron's LLaVAModel, whose encoder holds whole images and whose language model is split."""

from __future__ import annotations

import json

import pytest

from tests.megatron import llava_worker
from tests.megatron.launch import fork


@pytest.mark.ci
def test_images_before_text_at_two_ranks(tmp_path):
    assert fork(2, (tmp_path,), target=llava_worker.rank) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == len(llava_worker.FAULTS)
        for right, faulty in found.values():
            assert right < 1e-5 < 1e-3 < faulty, found
