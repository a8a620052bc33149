"""Sums of gradients: several tensors in one pass over memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.profiler import record_function

Pair = tuple[Tensor, Tensor]
"""(target, source) of one shape [rows, b, h, d]; each row of d is contiguous in the target."""


def add_(*pairs: Pair) -> None:
    """target += source of each pair, in the target's dtype, which is float32 or 64.

    On CUDA all pairs are one kernel, where Triton is installed.
    """
    with record_function("cp_ring: add gradients"):
        fused = _fused(pairs)
        if fused:
            fused(pairs, False)
            return
        for target, source in pairs:
            target += source


def move_(*pairs: Pair) -> None:
    """target = source of each pair, cast; then source = 0, so that the next sum starts anew. One kernel as `add_`."""
    fused = _fused(pairs)
    if fused:
        fused(pairs, True)
        return
    for target, source in pairs:
        target.copy_(source)
        source.zero_()


def _fused(pairs: Sequence[Pair]) -> Callable[[Sequence[Pair], bool], None] | None:
    return _triton() if all(x.is_cuda and x.dtype != torch.float64 for pair in pairs for x in pair) else None


@cache
def _triton() -> Callable[[Sequence[Pair], bool], None] | None:
    try:
        return importlib.import_module("cp_ring.ops.sums_triton").sum_
    except ImportError:
        return None
