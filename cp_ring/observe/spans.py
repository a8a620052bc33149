"""The marks in the hot path: what a hop computes and waits for. They do nothing unless somebody
looks.

Two look: torch's profiler, whose trace shows named blocks (Nsight and Perfetto show them too), and
`cp_ring.observe.timing`, which records times in sampled steps.
"""

from __future__ import annotations

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
    if (recording := timing.ACTIVE.value) is not None:
        return recording.block(recording.computing)
    return named(f"{name}, hop {hop.index}") if torch.autograd._profiler_enabled() else _NOTHING


def named(name: str) -> AbstractContextManager[object]:
    """A block that a trace of torch's profiler shows as `cp_ring: NAME`."""
    return record_function(f"cp_ring: {name}") if torch.autograd._profiler_enabled() else _NOTHING


def waiting() -> AbstractContextManager[object]:
    """A wait for messages, while this rank computes nothing."""
    recording = timing.ACTIVE.value
    return _NOTHING if recording is None else recording.block(recording.waiting)
