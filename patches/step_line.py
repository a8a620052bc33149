"""Adds a line per logged step to Megatron's log: loss, tokens per second and memory."""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import training
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers

    from cp_ring.megatron.training_log import StepLine

    yield training, "training_log", StepLine(training.training_log, get_args, get_timers, get_tensorboard_writer)


PATCH = Patch(
    name="step_line",
    what="adds one line per logged step, and two TensorBoard scalars: loss, tokens per second, peak memory of a rank",
    why="Megatron logs neither tokens per second nor, after the first step, memory, and its log function has no hook",
    versions=">=0.17,<0.20",
    replacements=_replacements,
)
