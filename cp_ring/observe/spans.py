"""The marks in the hot path: what a hop computes, waits for and posts. They do nothing unless
somebody looks.

Two look: torch's profiler, whose trace shows named blocks, and `cp_ring.observe.timing`, which
records times in sampled steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from cp_ring.observe import timing

_NOTHING = nullcontext()


def span(name: str, hop: Any) -> AbstractContextManager[object]:
    """The computation of a hop: a block that a trace of torch's profiler shows as
    `cp_ring: NAME, hop INDEX`.

    Without a profiler and outside of sampled steps it does nothing: even names take time.
    """
    if timing.ACTIVE.value is not None and (call := timing.current()) is not None:
        return call.computing(hop.index, hop.pairs)
    return (
        record_function(f"cp_ring: {name}, hop {hop.index}")
        if torch.autograd._profiler_enabled()
        else _NOTHING
    )


def waiting(kind: str, hop: int) -> AbstractContextManager[object]:
    """The wait for the messages of a kind (`keys`, `gradients` or `heads`) that were posted at a
    hop.
    """
    return _NOTHING if timing.ACTIVE.value is None else timing.ACTIVE.value.waiting(kind, hop)


def posted(
    kind: str,
    hop: int,
    sends: Iterable[tuple[int, int]],
    receives: Iterable[tuple[int, int]],
) -> None:
    """Notes that messages leave and are expected from now on: (rank in the job, bytes) each."""
    if timing.ACTIVE.value is not None:
        timing.ACTIVE.value.posted(kind, hop, sends, receives)


def arrived(peer: int) -> None:
    """Notes, inside of a `waiting` block, that a message of this rank of the job is here."""
    if timing.ACTIVE.value is not None:
        timing.ACTIVE.value.arrived(peer)


def traced[T](kernel_calls: Sequence[T]) -> Sequence[T]:
    """The kernel calls of a hop; while a trace is recorded, each of them is timed on its own."""
    return kernel_calls if timing.ACTIVE.value is None else timing.ACTIVE.value.traced(kernel_calls)
