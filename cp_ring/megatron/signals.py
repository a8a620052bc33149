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
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from types import FrameType

from cp_ring.runtime import RUNTIME

ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_WARNING = {signal.SIGUSR1}
_LOOK_S = 1.0  # interval at which a process checks that its parent is alive
_received: list[signal.Signals] = RUNTIME.of_process([])
# a registration in forked children cannot be undone
_forgotten: set[signal.Signals] = RUNTIME.of_process(set())


def keep_warnings(argv: Sequence[str]) -> None:
    """Block SIGUSR1 if the command line has Megatron's --exit-signal-handler. A batch system sends
    the signal minutes before the time limit; it stays pending until the first step is done.

    Slurm also sends the signal to the children of a rank (helpers of the checkpoint writer), which
    inherit the block but no handler, and sends it again while Python ends and has no handlers left.
    """
    if "--exit-signal-handler" in argv:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WARNING)


def listen(*more: signal.Signals) -> None:
    """Remember the signals in `ASKING` and `more` from now on; they do nothing else. Processes
    forked from now on handle them by default. Call it from the main thread.

    After SIGINT, a second SIGINT or a SIGTERM ends the process at once, because torchrun sends
    SIGTERM at the second Ctrl-C.
    """
    numbers = frozenset({*ASKING, *more})
    for number in numbers:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WARNING)
    if numbers - _forgotten:
        _forgotten.update(numbers)
        _forget_in_children(numbers)
        atexit.register(_end_in_peace)


def _end_in_peace() -> None:
    """Ignore SIGTERM while Python ends and removes its handlers: the launcher sends it again to a
    job that was asked to end and has saved.
    """
    if _received:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _forget_in_children(numbers: frozenset[signal.Signals]) -> None:
    masks: list[set[int | signal.Signals]] = []

    def block() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def forget() -> None:
        for number in numbers:
            if signal.getsignal(number) is _remember:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)


def outlive_all_but_the_parent() -> None:
    """Make this process ignore the signals that ask a job to end, except a SIGTERM from its parent;
    it also ends when its parent ends. Use it in processes that a rank needs for its last step or
    save.

    torchrun and Slurm send signals to the child processes of a rank too. A process that ignored its
    parent as well would keep the parent from ending. Call it in a process of `multiprocessing`.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *_WARNING})
    threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        came = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
        if came is not None and came.si_pid == parent:
            break
    os._exit(0)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Start processes in this thread with the signals in `ASKING` blocked. A spawned process needs
    about a second until it calls `outlive_all_but_the_parent`.
    """
    # multiprocessing starts it before the first process that is spawned, and unblocks signals
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def received() -> signal.Signals | None:
    """Return the first signal since `listen`, or None."""
    return _received[0] if _received else next(iter(signal.sigpending() & _WARNING), None)


def _remember(number: int, frame: FrameType | None) -> None:
    if signal.SIGINT in _received and number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _received.append(signal.Signals(number))
