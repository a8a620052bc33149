"""Logs tokens per second and memory of every logged step, in addition to Megatron's own values."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import global_vars, training

    from cp_ring.megatron.settings import current
    from cp_ring.megatron.training_log import StepLine

    timing = None
    if every := current().timing:
        from cp_ring.megatron.step_timing import step_timing

        timing = step_timing(every)
    yield training, "training_log", StepLine(training.training_log, global_vars, timing)


PATCH = Patch(
    what="records tokens per second and the peak memory of a rank in TensorBoard",
    why="Megatron logs neither tokens per second nor, after the first step, memory, and its log "
    "function has no hook",
    needed=lambda args, options: False,  # `install.log_steps` applies this patch
    replacements=_replacements,
)
