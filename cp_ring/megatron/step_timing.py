"""Times of sampled steps in a Megatron job: gathered a step later, then logged, and slow ranks and
links named.

The rank that writes Megatron's log, the last one, gets the findings. The ranks of a
context-parallel group first give their times to the first of them, so that what the last rank gets
stays small.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cp_ring.megatron import compat
from cp_ring.observe import clocks, timing
from cp_ring.observe.alarms import Alarms
from cp_ring.observe.findings import Findings, combined, group_findings
from cp_ring.observe.timed_messages import RankTimes
from cp_ring.options import Options


class StepTiming:
    """Follows the steps of a training loop; `sampler` decides which are recorded.

    Args:
        sampler: what decides; its recording of a step is read at the end of the next one, when a
        device has passed its marks.
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
        self._alarms = Alarms()
        self._pending: timing.Recording | None = None
        self._traced: dict[int, list[RankTimes]] = {}
        self._clock_error = 0.0

    def end_of_step(self, step: int, last: bool = False) -> list[Findings]:
        """Ends a step. Returns, on the last rank, the findings of the step before it, if that was
        sampled; all ranks call this.

        `last`: training ends with this step, so that it does not wait for another one.
        """
        findings = self._gather(self._pending)
        self._pending = self.sampler.close(step)
        if last:
            findings += self._gather(self._pending)
            self._pending = None
        return findings

    def _gather(self, recording: timing.Recording | None) -> list[Findings]:
        if recording is None or recording.step is None:
            return []
        group, world, last = self.group(), dist.group.WORLD, dist.get_world_size() - 1
        offset = clocks.offset(world if recording.kernels else group)
        mine = RankTimes(
            dist.get_rank(),
            socket.gethostname(),
            recording.resolve(),
            recording.plan_seconds,
            offset.seconds,
        )
        if recording.kernels:
            self._trace(recording.step, _gathered((mine, offset.error), world, last))
        ranks = _gathered((mine, offset.error), group, 0)
        findings = None
        if ranks:
            findings = group_findings(
                recording.step, [times for times, _ in ranks], max(error for _, error in ranks)
            )
        groups = [
            each for each in _gathered(findings, world, last) if each is not None and each.calls
        ]
        if not groups:
            return []
        whole = combined(groups)
        self.say(f"cp_ring: {whole.line()}")
        for line in self._alarms.lines(whole):
            self.say(f"cp_ring: warning: {line}")
        return [whole]

    def _trace(self, step: int, ranks: list[tuple[RankTimes, float]]) -> None:
        """Adds a step to the trace, on the last rank, and writes it."""
        if not ranks:
            return
        self._traced[step] = [times for times, _ in ranks]
        self._clock_error = max(self._clock_error, *(error for _, error in ranks))
        path = Path(f"trace-{self.sampler.traced.start}.json").absolute()
        from cp_ring.observe import trace

        try:
            trace.write(path, self._traced, self._clock_error)
        except OSError as error:
            self.say(f"cp_ring: {path} cannot be written; the job goes on: {error.strerror}")
            return
        if step == self.sampler.traced[-1]:
            self.say(f"cp_ring: the trace is in {path}: open it at https://ui.perfetto.dev")


def _gathered(mine: Any, group: Any, place: int) -> list[Any]:
    """What each rank of `group` gives, on the rank at `place` in it; [] on the others."""
    gathers = dist.get_rank(group) == place
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if gathers else None
    dist.gather_object(mine, gathered, group=group, group_dst=place)
    return gathered or []


def step_timing(config: Options) -> StepTiming | None:
    """What follows the steps of a job with these settings; None if no step is to be measured.
    Attention calls tell the step.
    """
    wanted = bool(config.timing or config.traced)
    sampler = timing.Sampler(config.timing, config.traced) if wanted else None
    timing.SAMPLER.value = sampler
    if sampler is None:
        return None
    return StepTiming(sampler, lambda: compat.group_of(None, "cp"))
