"""Signals that ask a job to save and leave (time limit, preemption): remembered from the first moment until training can act.

Nothing heavy is imported here, so that a rank listens before it loads torch; a signal would otherwise end it on the spot.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType

ASKING = (signal.SIGUSR1, signal.SIGTERM)

_received: list[signal.Signals] = []


def listen(*more: signal.Signals) -> None:
    """From now on the signals in `ASKING`, and `more`, are remembered and do nothing else. For the main thread."""
    for number in {*ASKING, *more}:
        signal.signal(number, _remember)


def listen_if_asked(argv: Sequence[str]) -> None:
    """`listen` where the command line has Megatron's --exit-signal-handler."""
    if "--exit-signal-handler" in argv:
        listen()


def received() -> signal.Signals | None:
    """The first signal that came since `listen`, or None."""
    return _received[0] if _received else None


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
