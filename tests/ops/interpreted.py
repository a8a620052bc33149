"""Runs a program whose Triton kernels are interpreted, in a process of its own."""

import os
from pathlib import Path

from tests.rank_pool import python


def interpreted(program):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = python("-c", f"import torch; {program}", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
