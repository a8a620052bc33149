"""verl's own packing under the certificate: `pytest -m slow tests/programs/test_verl.py`, with a
checkout of verl in .compat/verl.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.megatron.launch import launch

ROOT = Path(__file__).parents[2]
VERL = ROOT / ".compat" / "verl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VERL.exists(), reason="needs a checkout of verl in .compat/verl"),
]


def test_the_lines_of_the_page_are_certified_and_labels_rolled_too_late_are_not(tmp_path):
    file = tmp_path / "found.json"
    job = ["-m", "tests.programs.verl_worker", str(file), str(VERL)]
    ended = launch(2, job, python_path=str(ROOT))
    assert ended.returncode == 0, ended.stdout[-8000:]
    found = json.loads(file.read_text())
    assert any(layer.startswith("tiny model") for layer in found["models"])
    # the page gives no length of sequences
    assert [line.split(" (")[0] for line in found["not covered"]] == [
        "the microbatch at the job's own length"
    ]
    assert "packed: label wrong in" in found["stopped"]
