"""Gathers the times of sampled steps in a Megatron job, one step later, on the last rank, which
writes Megatron's log.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from cp_ring.megatron.adapter import compat
from cp_ring.observe import timing
from cp_ring.observe.timing import Findings, RankTimes


class StepTiming:
    """Follows the steps of a training loop and gathers the recorded ones.

    Args:
        sampler: decides which steps are recorded. A recording is read at the end of the next step,
            when the device has passed its marks.
        group: returns the context-parallel group of this rank.
        say: gets the lines for people, on the last rank.
    """

    def __init__(
        self,
        sampler: timing.Sampler,
        group: Callable[[], Any],
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self.sampler, self.group, self.say = sampler, group, say
        self._pending: timing.Recording | None = None

    def end_of_step(self, step: int, last: bool = False) -> list[Findings]:
        """End a step. All ranks call it. The last rank returns the findings of the previous step,
        if that step was sampled.

        last: training ends with this step, so its own findings are returned too.
        """
        findings = self._gather(self._pending)
        self._pending = self.sampler.close(step)
        if last:
            findings += self._gather(self._pending)
            self._pending = None
        return findings

    def _gather(self, recording: timing.Recording | None) -> list[Findings]:
        if recording is None:
            return []
        group, last = dist.get_process_group_ranks(self.group())[0], dist.get_world_size() - 1
        mine = RankTimes(dist.get_rank(), socket.gethostname(), group, *recording.seconds())
        ranks: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == last else None
        )
        dist.gather_object(mine, ranks, dst=last)
        ranks = [each for each in ranks or [] if each.computing]
        if not ranks:
            return []
        findings = timing.compared(recording.step, ranks)
        self.say(f"cp_ring: {findings.line()}")
        return [findings]


def step_timing(every: int) -> StepTiming:
    """Return the `StepTiming` of a job that measures one step in `every`. Attention calls tell it
    the step.
    """
    timing.SAMPLER.value = sampler = timing.Sampler(every)
    return StepTiming(sampler, lambda: compat.group_of(None, "cp"))
