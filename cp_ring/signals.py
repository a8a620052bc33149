"""Signals that ask a job to save and leave (time limit, preemption): remembered from the first moment until training can act.

Nothing heavy is imported here, so that a rank listens before it loads torch; a signal would otherwise end it on the spot.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

ASKING = (signal.SIGUSR1, signal.SIGTERM)

_BLOCKED = {signal.SIGUSR1}
_received: list[signal.Signals] = []


def listen(*more: signal.Signals) -> None:
    """From now on the signals in `ASKING`, and `more`, are remembered and do nothing else. For the main thread.

    SIGUSR1 is blocked too, and stays pending: Slurm sends it to a rank's children as well, which inherit the block but would
    not inherit a handler (helpers of the checkpoint writer), and again while Python, on its way out, has no handlers any more.
    """
    for number in {*ASKING, *more}:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)


def listen_if_asked(argv: Sequence[str]) -> None:
    """`listen` where the command line has Megatron's --exit-signal-handler."""
    if "--exit-signal-handler" in argv:
        listen()


def received() -> signal.Signals | None:
    """The first signal that came since `listen`, or None."""
    return _received[0] if _received else next(iter(signal.sigpending() & _BLOCKED), None)


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
