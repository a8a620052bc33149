"""Sums of gradients: several tensors in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from cp_ring.ops.fused import FusedFunction

Pair = tuple[Tensor, Tensor]
"""(target, source) of one shape [tokens, b, h, d]. The last dimension of the target is contiguous."""

_fused = FusedFunction("cp_ring.ops.sums_triton", "sum_")


def add_(*pairs: Pair) -> None:
    """target += source of each pair, in the target's dtype, which is float32 or float64.

    On CUDA, with Triton, all pairs are one kernel.
    """
    with record_function("cp_ring: add gradients"):
        if not _run_fused(pairs, move=False):
            for target, source in pairs:
                target += source


def move_(*pairs: Pair) -> None:
    """target = source of each pair, cast to the target's dtype; then source = 0, ready for the next sum. One kernel as `add_`."""
    if not _run_fused(pairs, move=True):
        for target, source in pairs:
            target.copy_(source)
            source.zero_()


def _run_fused(pairs: tuple[Pair, ...], move: bool) -> bool:
    """Runs the Triton kernel; false if it cannot be used."""
    filled = [pair for pair in pairs if pair[0].numel()]
    fits = all(x.is_cuda and x.dtype != torch.float64 for pair in filled for x in pair)
    return not filled or (fits and _fused.run(filled, move))
