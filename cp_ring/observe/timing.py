"""Times of ring attention in sampled steps: what each hop computes, what it waits for, and when its
messages leave and arrive.

In a sampled step a `Recording` is in `ACTIVE`, and the marks of `cp_ring.observe.spans` write into
it. A mark is a reading of a monotonic clock on the CPU, and an event on CUDA, which is read a step
later, when the device has long passed it. In all other steps `ACTIVE` holds None, and the marks do
nothing. What the times mean is found out by `cp_ring.observe.findings`.

Ranks are those of the whole job. Times are seconds of the clock of the rank's host
(`time.perf_counter`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from cp_ring.runtime import RUNTIME, Cell

MAX_CALLS = 512
"""Calls of a step that a rank records, forward and backward counted apart; the rest of the step is
not looked at.
"""

Mark = Any
"""A reading of the clock: seconds, or an event of CUDA until `Recording.resolve`."""

clock: Callable[[], float] = time.perf_counter


def _event() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(slots=True)
class TimedBlock:
    """Something that a hop begins and ends."""

    hop: int
    begin: Mark = None
    end: Mark = None

    @property
    def seconds(self) -> float:
        """What it takes, once the marks are seconds."""
        return float(self.end - self.begin)


@dataclass(slots=True)
class HopTime(TimedBlock):
    """The computation of a hop: `pairs` of queries and keys, and the times of its kernel calls
    where a trace is recorded.
    """

    pairs: int = 0
    kernels: list[tuple[Mark, Mark]] = field(default_factory=list)


@dataclass(slots=True)
class WaitTime(TimedBlock):
    """A wait for the messages of a kind that were posted at a hop, and after which time the
    messages of each rank were there.
    """

    kind: str = ""
    arrivals: list[tuple[int, Mark]] = field(default_factory=list)


@dataclass(slots=True)
class PostTime:
    """Messages that were posted together: (rank, bytes) of those that leave and of those that are
    expected.
    """

    kind: str
    hop: int
    at: Mark
    sends: list[tuple[int, int]]
    receives: list[tuple[int, int]]


class _Block:
    """A block whose begin and end are marked in `time`."""

    __slots__ = ("_now", "_time")

    def __init__(self, time: TimedBlock, now: Callable[[], Mark]):
        self._time, self._now = time, now

    def __enter__(self) -> None:
        self._time.begin = self._now()

    def __exit__(self, *error: object) -> None:
        self._time.end = self._now()


@dataclass(slots=True)
class CallTimes:
    """Forward or backward of an attention call on a rank. `direction` `exchange` has the exchange
    of heads of the whole step.
    """

    rank: int
    step: int
    layer: int | str
    microbatch: int
    direction: str
    now: Callable[[], Mark]
    begin: Mark = None
    end: Mark = None
    hops: list[HopTime] = field(default_factory=list)
    waits: list[WaitTime] = field(default_factory=list)
    posts: list[PostTime] = field(default_factory=list)

    def computing(self, hop: int, pairs: int) -> _Block:
        """A block that computes a hop."""
        self.hops.append(HopTime(hop, pairs=pairs))
        return _Block(self.hops[-1], self.now)

    def waiting(self, kind: str, hop: int) -> _Block:
        """A block that waits for messages."""
        self.waits.append(WaitTime(hop, kind=kind))
        return _Block(self.waits[-1], self.now)

    @property
    def computed(self) -> float:
        """Seconds of its hops' computation."""
        return sum(hop.seconds for hop in self.hops)

    @property
    def waited(self) -> float:
        """Seconds of waiting for messages."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys."""
        return sum(hop.pairs for hop in self.hops)

    def resolve(self, seconds: Callable[[Mark], float]) -> None:
        """Replaces marks by seconds."""
        blocks: list[TimedBlock] = [*self.hops, *self.waits]
        for block in blocks:
            block.begin, block.end = seconds(block.begin), seconds(block.end)
        if self.end is not None:
            self.begin, self.end = seconds(self.begin), seconds(self.end)
        for hop in self.hops:
            hop.kernels = [(seconds(begin), seconds(end)) for begin, end in hop.kernels]
        for wait in self.waits:
            wait.arrivals = [(peer, seconds(at)) for peer, at in wait.arrivals]
        for post in self.posts:
            post.at = seconds(post.at)
        self.now = clock


class Recording:
    """What one process records in a step: the calls of its rank, or of all ranks where these are
    threads of it.

    Args:
        step: the step; calls of other steps are not recorded. None records every call.
        kernels: also time each kernel call, for a trace.
    """

    def __init__(self, step: int | None = None, kernels: bool = False):
        self.step, self.kernels = step, kernels
        self.calls: list[CallTimes] = []
        self.plan_seconds = 0.0
        self._exchanges: dict[int, CallTimes] = {}
        self._count: Counter[int] = Counter()
        self._last: tuple[int, Callable[[], Mark]] = (0, clock)

    @contextmanager
    def call(self, rank: int, place: Any, direction: str, device: torch.device) -> Iterator[None]:
        """The block is forward or backward of a call; `place` has step, layer and microbatch."""
        if self._count[rank] >= MAX_CALLS or self.step not in (None, place.step):
            yield
            return
        self._count[rank] += 1
        now = self.note(rank, device)
        call = CallTimes(rank, place.step, place.layer, place.microbatch, direction, now, now())
        _thread.call = call
        try:
            yield
        finally:
            _thread.call = None
        call.end = now()
        self.calls.append(call)

    def note(self, rank: int, device: torch.device) -> Callable[[], Mark]:
        """Notes which rank this thread is, on which device; returns its clock."""
        now = _event if device.type == "cuda" else clock
        self._last = _thread.last = rank, now
        return now

    def waiting(self, kind: str, hop: int) -> Any:
        call = self._call_or_exchange(kind)
        return nullcontext() if call is None else call.waiting(kind, hop)

    def posted(
        self,
        kind: str,
        hop: int,
        sends: Iterable[tuple[int, int]],
        receives: Iterable[tuple[int, int]],
    ) -> None:
        call = self._call_or_exchange(kind)
        if call is not None:
            call.posts.append(PostTime(kind, hop, call.now(), _by_peer(sends), _by_peer(receives)))

    def arrived(self, peer: int) -> None:
        call = current() or self._exchanges.get(getattr(_thread, "last", self._last)[0])
        if call is not None and call.waits and call.waits[-1].end is None:
            call.waits[-1].arrivals.append((peer, call.now()))

    def traced[T](self, kernel_calls: Sequence[T]) -> Sequence[T]:
        call = current() if self.kernels else None
        if call is None:
            return kernel_calls
        return [_TimedCall(each, call) for each in kernel_calls]  # type: ignore[misc]

    @contextmanager
    def waiting_for_plan(self) -> Iterator[None]:
        begun = clock()
        yield
        self.plan_seconds += clock() - begun

    def _call_or_exchange(self, kind: str) -> CallTimes | None:
        """The call that runs in this thread. Heads are exchanged outside of calls: then what the
        rank keeps for the step.
        """
        call = current()
        if call is not None or kind != "heads":
            return call
        rank, now = getattr(_thread, "last", self._last)
        if rank not in self._exchanges:
            self._exchanges[rank] = CallTimes(rank, self.step or 0, "", 0, "exchange", now)
        return self._exchanges[rank]

    def resolve(self) -> list[CallTimes]:
        """All calls, with seconds in place of marks. On CUDA it waits until the device has passed
        the last mark.
        """
        base: tuple[Any, float] | None = None

        def seconds(mark: Mark) -> float:
            nonlocal base
            if isinstance(mark, float):
                return mark
            if base is None:
                event = _event()
                event.synchronize()
                base = event, clock()
            return float(base[1] - mark.elapsed_time(base[0]) / 1e3)

        for call in (*self.calls, *self._exchanges.values()):
            call.resolve(seconds)
        for exchange in self._exchanges.values():
            marks = [mark for wait in exchange.waits for mark in (wait.begin, wait.end)]
            marks += [post.at for post in exchange.posts]
            exchange.begin, exchange.end = min(marks), max(marks)
            self.calls.append(exchange)
        self._exchanges = {}
        return self.calls


class _TimedCall:
    """A kernel call that times itself."""

    def __init__(self, kernel_call: Any, call: CallTimes):
        self._kernel_call, self._call = kernel_call, call

    def attend(self, *args: Any) -> Any:
        return self._timed(self._kernel_call.attend, args)

    def gradients(self, *args: Any) -> Any:
        return self._timed(self._kernel_call.gradients, args)

    def _timed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        begin = self._call.now()
        result = function(*args)
        self._call.hops[-1].kernels.append((begin, self._call.now()))
        return result


def _by_peer(messages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    total: Counter[int] = Counter()
    for peer, size in messages:
        total[peer] += size
    return list(total.items())


ACTIVE: Cell[Recording | None] = RUNTIME.cell(None)
"""The recording of the sampled step that runs; None in other steps."""

_thread = RUNTIME.of_process(threading.local())
_NOTHING = nullcontext()


def current() -> CallTimes | None:
    """The call that runs in this thread and is recorded."""
    return getattr(_thread, "call", None)


def timed(rank: int, place: Any, direction: str, device: torch.device) -> Any:
    """A block that is forward or backward of a call of `rank`."""
    return _NOTHING if ACTIVE.value is None else ACTIVE.value.call(rank, place, direction, device)


def note_rank(rank: int, device: torch.device) -> None:
    """Tells the recording, if there is one, that this thread is of `rank`, before heads are
    exchanged for its first call.
    """
    if ACTIVE.value is not None:
        ACTIVE.value.note(rank, device)


def waiting_for_plan() -> Any:
    """A block that waits for the plan of a microbatch."""
    return _NOTHING if ACTIVE.value is None else ACTIVE.value.waiting_for_plan()


@contextmanager
def record(kernels: bool = False) -> Iterator[Recording]:
    """Records all attention calls of this process until the block ends. Use `resolve` of what it
    returns afterwards.
    """
    before, ACTIVE.value = ACTIVE.value, Recording(kernels=kernels)
    try:
        yield ACTIVE.value
    finally:
        ACTIVE.value = before


class Sampler:
    """Decides which steps are recorded: every `every`-th (0: none), and the `traced` ones, these
    with their kernel calls.
    """

    def __init__(self, every: int, traced: range = range(0)):
        self.every, self.traced = every, traced
        self._closed = 0

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step > 0 and (step in self.traced or bool(self.every and step % self.every == 0))

    def at(self, step: int) -> None:
        """Begins to record where the training loop is in a step that is wanted. Evaluation after a
        step is not part of it.
        """
        if ACTIVE.value is None and step > self._closed and self.wants(step):
            ACTIVE.value = Recording(step, step in self.traced)

    def close(self, step: int) -> Recording | None:
        """Ends a step; returns what was recorded in it."""
        self._closed, recording = step, ACTIVE.value
        ACTIVE.value = None
        return recording or (Recording(step) if self.wants(step) else None)


SAMPLER: Cell[Sampler | None] = RUNTIME.cell(None)
"""The sampler of a training job; None without one."""


def at_step(step: int) -> None:
    """Tells the sampler, if there is one, in which step an attention call begins."""
    if SAMPLER.value is not None:
        SAMPLER.value.at(step)
