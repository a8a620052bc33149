"""Marks in the hot path for the computation and the waits of hops. They do nothing without an
observer.

There are two observers: torch's profiler, whose trace shows named blocks (Nsight and Perfetto show
them too), and `cp_ring.observe.timing`, which records times in sampled steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from cp_ring.observe import timing

_NOTHING = nullcontext()


def span(name: str, hop: Any) -> AbstractContextManager[object]:
    """Mark the computation of a hop as a block that a trace of torch's profiler shows as `cp_ring:
    NAME, hop INDEX`.

    Without a profiler and outside of sampled steps it does nothing: even names take time.
    """
    if (recording := timing.ACTIVE.value) is not None:
        return recording.block(recording.computing)
    return named(f"{name}, hop {hop.index}") if torch.autograd._profiler_enabled() else _NOTHING


def named(name: str) -> AbstractContextManager[object]:
    """Mark a block that a trace of torch's profiler shows as `cp_ring: NAME`."""
    return record_function(f"cp_ring: {name}") if torch.autograd._profiler_enabled() else _NOTHING


def wait_for(pending: Any) -> None:
    """Wait for messages, and mark the time in which this rank computes nothing."""
    if (recording := timing.ACTIVE.value) is None:
        pending.wait()
    else:
        with recording.block(recording.waiting):
            pending.wait()
