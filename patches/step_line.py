"""Logs the times of sampled steps, in addition to Megatron's own values."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import global_vars, training

    from cp_ring.megatron.settings import current
    from cp_ring.megatron.step_timing import step_timing
    from cp_ring.megatron.training_log import with_times

    timing = step_timing(current().timing)
    yield training, "training_log", with_times(training.training_log, global_vars, timing)


PATCH = Patch(
    what="writes the times of the steps that --cp-ring-timing samples to TensorBoard",
    why="Megatron's log function has no hook",
    needed=lambda args, options: False,  # `install.log_steps` applies this patch
    replacements=_replacements,
)
