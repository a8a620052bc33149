"""Remembers the signals that ask a job to save and end (time limit, preemption, Ctrl-C) until
training can act, from the first step on. Before the first step there is nothing to save, and a
signal ends the job.

This module imports nothing heavy, so that a rank remembers signals before it loads torch.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from cp_ring.runtime import RUNTIME

ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_WARNING = {signal.SIGUSR1}
_LOOK_S = 1.0  # interval at which a process checks that its parent is alive
_received: list[signal.Signals] = RUNTIME.of_process([])


def keep_warnings(argv: Sequence[str]) -> None:
    """Block SIGUSR1 if the command line has Megatron's --exit-signal-handler. A batch system sends
    the signal minutes before the time limit; it stays pending until the first step is done.

    Slurm also sends the signal to the children of a rank, which inherit the block but no handler,
    and sends it again while Python ends and has no handlers left.
    """
    if "--exit-signal-handler" in argv:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WARNING)


def listen(*more: signal.Signals) -> None:
    """Remember the signals in `ASKING` and `more` from now on; they do nothing else. Call it from
    the main thread.

    After SIGINT, a second SIGINT or a SIGTERM ends the process at once, because torchrun sends
    SIGTERM at the second Ctrl-C.
    """
    if not _received:
        for number in (*ASKING, *more):
            signal.signal(number, _remember)


def received() -> signal.Signals | None:
    """Return the first signal since `listen`, or None."""
    return _received[0] if _received else next(iter(signal.sigpending() & _WARNING), None)


def _remember(number: int, frame: FrameType | None) -> None:
    if not _received:
        # a launcher sends it again, also while Python ends and removes its handlers
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    _received.append(signal.Signals(number))
    if number == signal.SIGINT:
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_DFL)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Start processes in this thread with the signals in `ASKING` blocked."""
    # multiprocessing starts it before the first process that is spawned, and unblocks signals
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_in_child(run: Callable[[], object]) -> None:
    """Call `run` in a process that `multiprocessing` started within `blocked_in_children`. The
    process ends when its parent sends SIGTERM or is gone.

    torchrun and Slurm send signals to the children of a rank too, which the rank needs for its last
    step and its last save. A child that ignored its parent as well would keep it from ending.
    """
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    run()


def _end_with(parent: Any) -> None:
    direct = os.getppid() == parent.pid  # not of a fork server
    while os.getppid() == parent.pid if direct else parent.is_alive():
        came = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
        if came is not None and came.si_pid == parent.pid:
            break
    os._exit(0)
