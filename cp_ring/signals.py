"""Signals that ask a job to save and end (time limit, preemption, Ctrl-C): remembered from the
start until training can act.

Nothing heavy is imported here, so that a rank listens before it loads torch; without a handler, a
signal would end it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from cp_ring.runtime import RUNTIME

ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_BLOCKED = {signal.SIGUSR1}
_received: list[signal.Signals] = RUNTIME.of_process([])


def listen(*more: signal.Signals) -> None:
    """From now on the signals in `ASKING`, and `more`, are remembered and do nothing else. Call it
    from the main thread.

    After SIGINT, a second SIGINT or a SIGTERM ends the process at once: torchrun sends SIGTERM at
    the second Ctrl-C. SIGUSR1 is blocked too, and stays pending. Slurm sends it to the children of
    a rank as well (helpers of the checkpoint writer), which inherit the block but no handler. Slurm
    also sends it again while Python ends and has no handlers any more.
    """
    for number in {*ASKING, *more}:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def listen_if_asked(argv: Sequence[str]) -> None:
    """`listen` where the command line has Megatron's --exit-signal-handler."""
    if "--exit-signal-handler" in argv:
        listen()


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """While this lasts, the signals in `ASKING` do nothing; in the main thread only, where handlers
    can be set.
    """
    earlier = {}
    try:
        with contextlib.suppress(ValueError):
            for number in ASKING:
                earlier[number] = signal.signal(number, signal.SIG_IGN)
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def received() -> signal.Signals | None:
    """The first signal that came since `listen`, or None."""
    return _received[0] if _received else next(iter(signal.sigpending() & _BLOCKED), None)


def _remember(number: int, frame: FrameType | None) -> None:
    if signal.SIGINT in _received and number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _received.append(signal.Signals(number))
