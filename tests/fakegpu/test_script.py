"""The script for a real GPU, step by step, with the real libraries of an H100 on a fake one."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.fakegpu import te_build
from tests.fakegpu.build import HERE

PRIVATE = re.compile(r"\._[a-z]\w*")


@pytest.mark.slow
def test_every_step_runs(gpus, tmp_path):
    te_build.build(te_build.VERSION)
    done = subprocess.run(
        ["bash", str(HERE.parent / "gpu" / "run.sh"), "--device", "fake"],
        env=os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + (tmp_path / "results.log").read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    kernels = {row.get("kernel") for row in rows if "rejected" not in row}
    assert {"transformer_engine", "flash_aten"} <= kernels


def test_private_names_that_the_steps_read_exist():
    """Else a step would find it on a GPU alone."""

    def names(folder):
        return {name for path in folder.rglob("*.py") for name in PRIVATE.findall(path.read_text())}

    used = names(HERE.parent / "gpu")
    others = {"._sleep", "._coalescing_manager"}  # of torch and Megatron
    assert "._untried" in used and used <= names(HERE.parents[1] / "cp_ring") | others
