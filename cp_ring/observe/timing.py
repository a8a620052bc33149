"""Times of ring attention in sampled steps: how long each rank computes and waits, and which rank
is the slowest.

In a sampled step a `Recording` is in `ACTIVE`, and the marks of `cp_ring.observe.spans` write into
it. A mark is a reading of a monotonic clock on the CPU, or an event on CUDA, which is read a step
later, when the device has long passed it. In all other steps `ACTIVE` holds None, and the marks do
nothing. One process is one rank here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from cp_ring.runtime import RUNTIME, Cell

MAX_BLOCKS = 10_000
"""The most blocks of a kind that are recorded in a step; the rest of the step is ignored."""

Mark = Any
"""A reading of the clock: seconds, or an event of CUDA."""

clock: Callable[[], float] = time.perf_counter


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Recording:
    """The blocks of a step, each with its begin and end: hops that compute, and waits for messages
    while nothing is computed (exposed communication).

    plan_seconds: how long layers waited for plans of microbatches.
    """

    step: int
    computing: list[tuple[Mark, Mark]] = field(default_factory=list)
    waiting: list[tuple[Mark, Mark]] = field(default_factory=list)
    plan_seconds: float = 0.0

    @contextmanager
    def block(self, blocks: list[tuple[Mark, Mark]]) -> Iterator[None]:
        """Add a block to `computing` or `waiting`."""
        if len(blocks) >= MAX_BLOCKS:
            yield
            return
        now = _event if torch.cuda.is_available() else clock
        begin = now()
        yield
        blocks.append((begin, now()))

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds that this rank computed, waited for messages, and waited for plans. On
        CUDA it waits until the device has passed the last mark.
        """
        return _sum(self.computing), _sum(self.waiting), self.plan_seconds


def _sum(blocks: Sequence[tuple[Mark, Mark]]) -> float:
    if not blocks or isinstance(blocks[0][0], float):
        return float(sum(end - begin for begin, end in blocks))
    blocks[-1][1].synchronize()
    return float(sum(begin.elapsed_time(end) for begin, end in blocks) / 1e3)


@dataclass(frozen=True)
class RankTimes:
    """The seconds of a rank in a sampled step. `group` names its context-parallel group, whose
    ranks make the same calls.
    """

    rank: int
    host: str
    group: int
    computing: float
    waiting: float
    plans: float


@dataclass(frozen=True)
class Findings:
    """The results of a sampled step: mean seconds of the ranks, the longest wait for plans, and the
    rank that computes longest, with its time over the median of the others of its group (`slower`).
    `slowest` is None if no group has two ranks.
    """

    step: int
    computing: float
    waiting: float
    plans: float
    slowest: RankTimes | None
    slower: float

    @property
    def exposed(self) -> float:
        """The share of waiting in the time of attention."""
        return self.waiting / ((self.computing + self.waiting) or 1.0)

    def line(self) -> str:
        """Return the findings as a line for people."""
        parts = [
            f"timing of step {self.step}: attention computes {self.computing * 1e3:.1f} ms and "
            f"waits {self.waiting * 1e3:.1f} ms ({self.exposed:.1%})"
        ]
        if self.slowest is not None:
            slow = self.slowest
            parts.append(f"slowest rank {slow.rank} ({slow.host}): {self.slower - 1:+.0%}")
        if self.plans > 1e-3:
            parts.append(f"waited {self.plans * 1e3:.1f} ms for plans")
        return "; ".join(parts)

    def scalars(self) -> dict[str, float]:
        """Return the findings as numbers for a log, by name."""
        rank = {} if self.slowest is None else {"slowest rank": float(self.slowest.rank)}
        return rank | {
            "computing (ms)": self.computing * 1e3,
            "exposed communication (ms)": self.waiting * 1e3,
            "exposed communication (share)": self.exposed,
            "slowest rank over the median": self.slower,
        }


def compared(step: int, ranks: Sequence[RankTimes]) -> Findings:
    """Return the findings of a step, from the times of all ranks."""
    slowest, slower = None, 1.0
    for each in ranks:
        others = [
            other.computing for other in ranks if other.group == each.group and other is not each
        ]
        ratio = each.computing / (median(others) or 1.0) if others else 0.0
        if others and (slowest is None or ratio > slower):
            slowest, slower = each, ratio
    return Findings(
        step,
        fmean(each.computing for each in ranks),
        fmean(each.waiting for each in ranks),
        max(each.plans for each in ranks),
        slowest,
        slower,
    )


ACTIVE: Cell[Recording | None] = RUNTIME.cell(None)
"""The recording of the sampled step that runs; None in other steps."""


@contextmanager
def waiting_for_plan() -> Iterator[None]:
    """Mark a wait for the plan of a microbatch."""
    recording, begin = ACTIVE.value, clock()
    yield
    if recording is not None:
        recording.plan_seconds += clock() - begin


class Sampler:
    """Records every `every`-th step."""

    def __init__(self, every: int):
        self.every, self._closed = every, 0

    def wants(self, step: int) -> bool:
        """Return True if the step is recorded."""
        return step > 0 and step % self.every == 0

    def at(self, step: int) -> None:
        """Begin to record if the training loop is in a step that is wanted. Evaluation after a step
        is not part of it.
        """
        if ACTIVE.value is None and step > self._closed and self.wants(step):
            ACTIVE.value = Recording(step)

    def close(self, step: int) -> Recording | None:
        """End a step, and return its recording."""
        self._closed, recording = step, ACTIVE.value
        ACTIVE.value = None
        return recording or (Recording(step) if self.wants(step) else None)


SAMPLER: Cell[Sampler | None] = RUNTIME.cell(None)
"""The sampler of a training job; None without one."""


def at_step(step: int) -> None:
    """Tell the sampler, if there is one, in which step an attention call begins."""
    if SAMPLER.value is not None:
        SAMPLER.value.at(step)
