"""Runs a program whose Triton kernels are interpreted, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rank_pool import LIMIT_S


def interpreted(program):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", f"import torch; {program}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
