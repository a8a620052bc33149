"""One microbatch ahead: while a microbatch is computed, the layout and the plan of the next one are made on a worker thread.

The time that a step waits for them all the same is counted, and is in the step's line.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

KEPT = 8
"""How many results of `begin` are kept: more than a microbatch and the next one of every virtual pipeline stage."""

_begun: OrderedDict[Hashable, Future[Any]] = OrderedDict()
_waited = 0.0


@cache
def worker() -> ThreadPoolExecutor:
    """The thread that makes layouts and plans."""
    return ThreadPoolExecutor(1, thread_name_prefix="cp_ring-plan")


def begin[T](key: Hashable, make: Callable[[], T]) -> Future[T]:
    """Starts `make` on the worker thread, once for equal keys."""
    if key not in _begun:
        _begun[key] = worker().submit(make)
        while len(_begun) > KEPT:
            _begun.popitem(last=False)
    return _begun[key]


def wait_for[T](future: Future[T]) -> T:
    """The result, once it is there. The time until then counts as waiting."""
    global _waited
    if future.done():
        return future.result()
    start = time.perf_counter()
    try:
        return future.result()
    finally:
        _waited += time.perf_counter() - start


def take_waited() -> float:
    """The seconds of all `wait_for` since the last call."""
    global _waited
    seconds, _waited = _waited, 0.0
    return seconds


class Following:
    """An iterator over microbatches that can tell the next one before it is asked for."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._next: list[Any] = []

    def __iter__(self) -> Following:
        return self

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._batches)

    def peek(self) -> Any:
        """The microbatch that `next` returns next; None at the end."""
        if not self._next:
            try:
                self._next.append(next(self._batches))
            except StopIteration:
                return None
        return self._next[0]


def following(data_iterator: Any) -> Any:
    """The microbatch after the one that was just read; None at the end, and where it is not known.

    Megatron's iterator of a training loop keeps the microbatches of a step, to read them again where it repeats the step. What
    is read ahead is read below it, so that it keeps those that it has given out.
    """
    if not hasattr(data_iterator, "iterable") or getattr(data_iterator, "replaying", False):
        return None
    if not isinstance(data_iterator.iterable, Following):
        data_iterator.iterable = Following(data_iterator.iterable)
    return data_iterator.iterable.peek()
