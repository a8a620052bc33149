"""Sums of partial gradients, several in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.ops.fused import FusedFunction
from cp_ring.ops.segments import Segments
from cp_ring.runtime import RUNTIME

_fused = RUNTIME.of_process(FusedFunction("cp_ring.ops.sums_triton", "add"))


def add(
    segments: Segments,
    parts: Sequence[Sequence[Tensor]],
    running: Sequence[Tensor],
    results: Sequence[Tensor],
    dim: int = 0,
) -> None:
    """Run one update of one total, or of two, as dk and dv: add `parts`, one by one, to the stored
    totals, and store the new ones. A part has a tensor [t, b, h, d] for each total, whose sizes d
    may differ. With `dim` 1 the tokens of all these tensors are the second dimension.

    `running` [kept, b, h, d] holds the total in `sum_dtype` between updates. Complete tokens go to
    `results` [s, b, h, d], which are empty if there are none; they may be `running` themselves.
    Tokens that no part has get 0. On CUDA, with Triton, it is one kernel.
    """
    fits = results[0].is_cuda and results[0].dtype != torch.float64 and segments.parts
    if fits and _fused.run(segments, parts, running, results, dim):
        return
    for mid, result, *of_total in zip(running, results, *parts, strict=True):
        for segment in segments.each:
            target, total, places = segment.begin(of_total, mid, result, dim)
            for place in places:
                total += segment.take(place, of_total, dim)
            if total is not target:
                target.copy_(total)
