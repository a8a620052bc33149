"""A mode for finding faults: buffers hold NaN until a message arrives, and ranks compare each call
before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from cp_ring.runtime import RUNTIME

_depth = RUNTIME.cell(0)


@contextmanager
def debugging(active: bool = True) -> Iterator[None]:
    """Look for faults in forward and backward of ring attention while the block runs; all ranks
    must be in such a block.

        with debugging():
            out = ring_attention(q, k, v, group)

    Receive buffers are filled with NaN before each message, so that a token that was not received
    makes out NaN instead of slightly wrong. The ranks of a group compare every call, not only new
    ones. Both cost time. The block holds for the whole process, because autograd runs backward in
    threads of its own.
    """
    _depth.value += active
    try:
        yield
    finally:
        _depth.value -= active


def switch_on() -> None:
    """Debug until the process ends."""
    _depth.value += 1


def enabled() -> bool:
    """Return True if a `debugging` block is active."""
    return _depth.value > 0


def fill(*buffers: Tensor) -> None:
    """Fill buffers that are about to receive with NaN, if debugging is on. Buffers of integers keep
    their values.
    """
    if enabled():
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
