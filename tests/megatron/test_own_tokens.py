"""A layer whose configuration has context_parallel_size 1, in a job with more: plain attention of a
rank's own tokens.
"""

from __future__ import annotations

import json

import pytest

from tests.megatron import own_tokens_worker
from tests.megatron.launch import fork


@pytest.mark.parametrize("how", ["enable", "flags"])
def test_each_rank_attends_to_its_own_images(tmp_path, how):
    assert fork(2, (tmp_path, how), target=own_tokens_worker.rank) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["errors"]) == 4 and max(found["errors"].values()) < 2e-6, found
        assert found["said"] == ""
