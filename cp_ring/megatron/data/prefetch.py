"""Makes the layout and the plan of the next microbatch on a worker thread while the current one is
computed.

The time that a step still waits for them is counted, and is in the step's line.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cp_ring.runtime import RUNTIME

KEPT = 8
"""Number of results of `begin` that are kept: more than two microbatches of every virtual pipeline
stage.
"""


class _Ahead:
    """Holds the started results by key, the seconds that steps waited, and the worker thread."""

    def __init__(self) -> None:
        self.begun: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self.waited = 0.0
        self.worker: ThreadPoolExecutor | None = None

    def clear(self) -> None:
        if self.worker is not None:
            self.worker.shutdown(wait=False)
        self.__init__()  # type: ignore[misc]


_ahead = RUNTIME.keep(_Ahead())


def worker() -> ThreadPoolExecutor:
    """Return the thread that makes layouts and plans."""
    if _ahead.worker is None:
        _ahead.worker = ThreadPoolExecutor(1, thread_name_prefix="cp_ring-plan")
    return _ahead.worker


def begin[T](key: Hashable, make: Callable[[], T]) -> Future[T]:
    """Start `make` on the worker thread; equal keys share one result."""
    begun = _ahead.begun
    if key not in begun:
        begun[key] = worker().submit(make)
        while len(begun) > KEPT:
            begun.popitem(last=False)
    return begun[key]


def wait_for[T](future: Future[T]) -> T:
    """Wait for the result and return it. The time counts as waiting."""
    if future.done():
        return future.result()
    start = time.perf_counter()
    try:
        return future.result()
    finally:
        _ahead.waited += time.perf_counter() - start


def take_waited() -> float:
    """Return the seconds of all `wait_for` since the last call."""
    seconds, _ahead.waited = _ahead.waited, 0.0
    return seconds


class Following:
    """An iterator over microbatches that can look one microbatch ahead."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._next: list[Any] = []

    def __iter__(self) -> Following:
        return self

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._batches)

    def peek(self) -> Any:
        """Return the microbatch that the next call of `next` will return; None at the end."""
        if not self._next:
            try:
                self._next.append(next(self._batches))
            except StopIteration:
                return None
        return self._next[0]


def following(data_iterator: Any) -> Any:
    """Return the microbatch after the one that was just read; None at the end, and if it is
    unknown.

    The iterator of Megatron's training loop keeps the microbatches of a step, to read them again if
    it repeats the step. This function looks ahead in the iterator below, so that Megatron's
    iterator keeps only microbatches that it has returned.
    """
    if not hasattr(data_iterator, "iterable") or getattr(data_iterator, "replaying", False):
        return None
    if not isinstance(data_iterator.iterable, Following):
        data_iterator.iterable = Following(data_iterator.iterable)
    return data_iterator.iterable.peek()
