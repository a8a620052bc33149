"""Names for what a hop does, in the traces of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def span(name: str, hop: int) -> AbstractContextManager[object]:
    """A block that a trace shows as `cp_ring: NAME, hop HOP`. Without a profiler it does nothing: even names take time."""
    return record_function(f"cp_ring: {name}, hop {hop}") if torch.autograd._profiler_enabled() else _NOTHING
