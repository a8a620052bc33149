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
    parts: Sequence[Tensor],
    running: Tensor | None,
    result: Tensor,
    dim: int = 0,
) -> None:
    """Run one update: add `parts` [t, b, h, d], one by one, to the stored total, and store the new
    one. With `dim` 1 the tokens of all these tensors are the second dimension.

    `running` [kept, b, h, d] holds the total in `sum_dtype` between updates. Complete tokens go to
    `result` [s, b, h, d], which is empty if there are none. If `running` is None, `result` holds
    the running total too. Tokens that no part has get 0. On CUDA, with Triton, it is one kernel.
    """
    fits = result.is_cuda and result.dtype != torch.float64 and segments.parts > 0
    if not (fits and _fused.run(segments, parts, running, result, dim)):
        for segment in segments.each:
            target, total, places = segment.begin(parts, running, result, dim)
            for place in places:
                total += segment.take(place, parts, dim)
            if total is not target:
                target.copy_(total)
