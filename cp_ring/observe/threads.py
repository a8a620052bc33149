"""Threads that end before the interpreter does.

If Python finalizes while a daemon thread is in a call of C++, such as a question to a process
group's store, the interpreter ends that thread inside the call, and C++ aborts the process
(SIGABRT, "terminate called without an active exception"). A launcher takes that for a failure,
although the job was done.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

from cp_ring.runtime import RUNTIME

_JOIN_S = 10.0
_ending = RUNTIME.of_process(Event())
_threads: WeakSet[Thread] = RUNTIME.of_process(WeakSet())


def start(name: str, target: Callable[..., Any], *args: Any) -> Thread:
    """Start a daemon thread that the end of the process waits for. The thread must wait by `sleep`,
    and return when that returns False.
    """
    if not _threads:  # twice does no harm
        atexit.register(_end)
    thread = Thread(target=target, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def sleep(seconds: float) -> bool:
    """Wait. Return False, at once, when the process ends."""
    return not _ending.wait(seconds)


def _end() -> None:
    _ending.set()
    for thread in list(_threads):
        thread.join(_JOIN_S)
