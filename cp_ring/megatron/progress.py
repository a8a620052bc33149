"""Tells the batch script that started this job how far it came, whatever wrapper stands between."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cp_ring.megatron import compat

FILE = "CP_RING_PROGRESS"
"""The environment variable by which launch/slurm/train.sbatch names the file."""


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Write the steps done and the steps asked for to the file, at the end of the block, on rank 0.

    Megatron's training also ends by `sys.exit`. A job that does not train has done its steps, and
    Megatron counts no step that it skips (--iterations-to-skip).
    """
    try:
        yield
    finally:
        args = compat.arguments()
        path = os.environ.get(FILE)
        error = sys.exception()
        if args and path and os.environ.get("RANK", "0") == "0":
            done = getattr(args, "iteration", 0) + compat.steps_done()
            if hasattr(args, "curr_iteration") and not getattr(error, "code", error):
                done += 1  # that of the last step counts from 0
                while done + 1 in getattr(args, "iterations_to_skip", ()):
                    done += 1
            trains = not args.skip_train and getattr(args, "cp_ring_certify", "") != "only"
            target = (trains and args.train_iters) or done
            part = Path(f"{path}.part")  # no reader sees a half of it
            part.write_text(f"{min(done, target)} {target}\n")
            part.replace(path)
