"""Signals that ask a job to save and end (time limit, preemption, Ctrl-C): remembered from its
first step on, until training can act. Before that there is nothing to save, and a signal ends the
job.

Nothing heavy is imported here, so that a rank keeps warnings before it loads torch.
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
_LOOK_S = 1.0  # how often a process looks whether its parent is still there
_received: list[signal.Signals] = RUNTIME.of_process([])
# by children that are forked; a registration cannot be undone
_forgotten: set[signal.Signals] = RUNTIME.of_process(set())


def keep_warnings(argv: Sequence[str]) -> None:
    """Blocks SIGUSR1 where the command line has Megatron's --exit-signal-handler: a batch system
    sends it minutes before the time limit, and it stays pending until the first step is done.

    Slurm sends it to the children of a rank as well (helpers of the checkpoint writer), which
    inherit the block but no handler, and again while Python ends and has no handlers any more.
    """
    if "--exit-signal-handler" in argv:
        signal.pthread_sigmask(signal.SIG_BLOCK, _WARNING)


def listen(*more: signal.Signals) -> None:
    """From now on the signals in `ASKING`, and `more`, are remembered and do nothing else; in
    processes that are forked from now on they do what they do by default. Call it from the main
    thread.

    After SIGINT, a second SIGINT or a SIGTERM ends the process at once: torchrun sends SIGTERM at
    the second Ctrl-C.
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
    """Python takes its handlers down before it ends; a job that was asked to end gets SIGTERM again
    from its launcher, and has saved.
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
    """Of the signals that ask a job to end, only a SIGTERM of its parent ends this process, and the
    end of its parent does: a process that its rank needs for its last step or save.

    A process that ignores its parent too would keep that one from ending. torchrun and Slurm send
    signals to the processes of a rank too. Call it in a process of `multiprocessing`.
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
    """Processes that this thread starts while this lasts begin with the signals in `ASKING` blocked
    until they call `outlive_all_but_the_parent`: a process that is spawned needs a second to get
    there.
    """
    # multiprocessing starts it before the first process that is spawned, and unblocks signals
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def received() -> signal.Signals | None:
    """The first signal that came since `listen`, or None."""
    return _received[0] if _received else next(iter(signal.sigpending() & _WARNING), None)


def _remember(number: int, frame: FrameType | None) -> None:
    if signal.SIGINT in _received and number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _received.append(signal.Signals(number))
