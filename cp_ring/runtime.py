"""All state of this process that outlives a call: caches, settings in force, the watchdog's notes,
lines already printed.

A module that keeps such state registers it here, where `RUNTIME.reset()` finds it. A program that
trains one model after another, and each test, then begins as a new process does. Nothing is
imported here, so every module may use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Cell[T]:
    """One value that changes."""

    value: T


class Runtime:
    """The registered state, with a function that resets each part of it."""

    def __init__(self) -> None:
        self._resets: list[Callable[[], object]] = []

    def keep[T](self, state: T, reset: Callable[[], object] | None = None) -> T:
        """Register `state` and return it. `reset` is by default its method `clear`, or its
        `__init__` without arguments.
        """
        self._resets.append(reset or getattr(state, "clear", None) or state.__init__)  # type: ignore[misc]
        return state

    def cell[T](self, first: T) -> Cell[T]:
        """Return a registered value, which is `first` until it is set."""
        cell = Cell(first)
        return self.keep(cell, lambda: setattr(cell, "value", first))

    def of_process[T](self, state: T) -> T:
        """Return `state`, which a reset does not change: threads, locks of files, signals."""
        return state

    def cache[T](
        self, maxsize: int | None = None, typed: bool = False
    ) -> Callable[[Callable[..., T]], functools._lru_cache_wrapper[T]]:
        """A `functools.lru_cache` that a reset empties."""

        def decorate(function: Callable[..., T]) -> functools._lru_cache_wrapper[T]:
            cached = functools.lru_cache(maxsize, typed)(function)
            self._resets.append(cached.cache_clear)
            return cached

        return decorate

    def reset(self) -> None:
        """Give all registered state the value that it had when its module was imported. No call of
        attention may run meanwhile.
        """
        for reset in self._resets:
            reset()


RUNTIME = Runtime()
