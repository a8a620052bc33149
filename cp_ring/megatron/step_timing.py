"""Times of sampled steps in a Megatron job: gathered a step later, then logged, and slow ranks and links named.

The rank that writes Megatron's log, the last one, gets the findings. The ranks of a context-parallel group first give their times
to the first of them, so that what the last rank gets stays small.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from cp_ring.config import ContextParallelConfig
from cp_ring.megatron import compat
from cp_ring.observe import clocks, timing
from cp_ring.observe.findings import Alarms, Findings, RankTimes, combined, group_findings


class StepTiming:
    """Follows the steps of a training loop; `sampler` decides which are recorded.

    Args:
        sampler: what decides; its recording of a step is read at the end of the next one, when a device has passed its marks.
        group: returns the context-parallel group of this rank.
        say: gets the lines for people, on the last rank.
        trace: gets the times of all ranks of a traced step, on the first rank of each group: (step, times, clock error).
    """

    def __init__(
        self,
        sampler: timing.Sampler,
        group: Callable[[], Any],
        say: Callable[[str], None] = lambda line: print(line, flush=True),
        trace: Callable[[int, list[RankTimes], float], None] | None = None,
    ) -> None:
        self.sampler, self.group, self.say, self.trace = sampler, group, say, trace
        self._alarms = Alarms()
        self._pending: timing.Recording | None = None

    def end_of_step(self, step: int, last: bool = False) -> list[Findings]:
        """Ends a step. Returns, on the last rank, the findings of the step before it, if that was sampled; all ranks call this.

        `last`: training ends with this step, so that it does not wait for another one.
        """
        found = self._gather(self._pending)
        self._pending = self.sampler.close(step)
        if last:
            found += self._gather(self._pending)
            self._pending = None
        return found

    def _gather(self, recording: timing.Recording | None) -> list[Findings]:
        if recording is None or recording.step is None:
            return []
        group = self.group()
        offset = clocks.offset(group)
        mine = RankTimes(dist.get_rank(), socket.gethostname(), recording.resolve(), recording.plan_seconds, offset.seconds)
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object((mine, offset.error), gathered, group=group, group_dst=0)
        found = None
        if gathered is not None:
            ranks, error = [times for times, _ in gathered], max(error for _, error in gathered)
            found = group_findings(recording.step, ranks, error)
            if recording.kernels and self.trace is not None:
                self.trace(recording.step, ranks, error)
        size = dist.get_world_size()
        every: list[Any] | None = [None] * size if dist.get_rank() == size - 1 else None
        dist.gather_object(found, every, dst=size - 1)
        groups = [each for each in every or [] if each is not None and each.calls]
        if not groups:
            return []
        whole = combined(groups)
        self.say(f"cp_ring: {whole.line()}")
        for line in self._alarms.lines(whole):
            self.say(f"cp_ring: warning: {line}")
        return [whole]


def step_timing(config: ContextParallelConfig) -> StepTiming | None:
    """What follows the steps of a job with these settings; None if no step is to be measured. Attention calls tell the step."""
    timing.SAMPLER = timing.Sampler(config.timing) if config.timing else None
    return None if timing.SAMPLER is None else StepTiming(timing.SAMPLER, lambda: compat.group_of(None, "cp"))
