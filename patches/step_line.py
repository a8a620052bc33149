"""Logs the times of sampled steps, in addition to Megatron's own values."""

from __future__ import annotations

from contextlib import AbstractContextManager

from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import replaced
from cp_ring.patches.patch import Patch


def _sampling() -> AbstractContextManager[None]:
    from cp_ring.observe import timing

    return replaced((timing.SAMPLER, "value", timing.Sampler(current().timing)))


PATCH = Patch(
    what="writes the times of the steps that --cp-ring-timing samples to TensorBoard",
    why="Megatron's log function has no hook",
    needed=lambda args, options: options.enabled and options.timing and not args.program,
    wraps={"megatron.training.training.training_log": "cp_ring.megatron.step_timing.log_step"},
    within=_sampling,
)
