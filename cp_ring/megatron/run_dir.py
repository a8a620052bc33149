"""What a run leaves in --cp-ring-run-dir by Megatron's own training loop: a line per step, and DONE at its end."""

from __future__ import annotations

import importlib
import os
import sys

from cp_ring.observe import progress


def log_steps() -> None:
    """Makes Megatron's training loop say, and write, a line per step; not in versions of Megatron that this is not made for."""
    step_line = importlib.import_module("cp_ring.patches").get("step_line")
    if not step_line.refusal():
        step_line.apply()


def finish(folder: str) -> None:
    """Marks on rank 0 that the job needs no more starts: call it where training has returned.

    Megatron ends the process where it stops before the last step (signal, --exit-duration-in-mins, ...).
    """
    if folder and int(os.environ.get("RANK", "0")) == 0:
        os.makedirs(folder, exist_ok=True)
        progress.finish(folder, _wanted() or 0)


def all_steps_done() -> bool:
    """Whether Megatron's training loop has come to its last step."""
    wanted = _wanted()
    args = _arguments()
    done = max(getattr(args, "curr_iteration", -1) + 1, getattr(args, "iteration", None) or 0)
    return wanted is not None and done >= wanted


def _wanted() -> int | None:
    """The step at which training ends; None where Megatron's training loop has not been asked for any."""
    return getattr(_arguments(), "train_iters", None)


def _arguments() -> object:
    """Megatron's, as they are now; None for a script that has none."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
