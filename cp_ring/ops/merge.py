"""The online-softmax merge of partial results (out, lse), several in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.ops.fused import FusedFunction
from cp_ring.ops.segments import Segment, Segments
from cp_ring.runtime import RUNTIME

_UNSEEN = -1e30
"""A number below the lse of any query that saw a key."""

_fused = RUNTIME.of_process(FusedFunction("cp_ring.ops.merge_triton", "merge"))


def merge(
    segments: Segments,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    running: Tensor | None,
    lse: Tensor,
    result: Tensor,
) -> None:
    """Run one update: merge partial `outs` [t, b, h, e] and `lses` [b, h, t], one by one, with the
    stored total, and store the new one.

    `running` [kept, b, h, e] holds out in `sum_dtype` between updates, `lse` [b, h, s] the running
    lse in `lse_dtype`. Complete tokens go to `result` [s, b, h, e], which may be `running`, and is
    empty if there are none. Without `running`, everything is complete after this update. Tokens
    that no part has get 0 and -inf. On CUDA, with Triton, it is one kernel.
    """
    fits = result.is_cuda and lse.dtype == torch.float32 and segments.parts > 0
    if not (fits and _fused.run(segments, outs, lses, running, lse, result)):
        for segment in segments.each:
            merge_segment(segment, outs, lses, running, lse, result)


def merge_segment(
    segment: Segment,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    running: Tensor | None,
    lse: Tensor,
    result: Tensor,
) -> None:
    """Merge one segment of `merge` with torch operations."""
    target, total, places = segment.begin(outs, running, result)
    if segment.size < lse.shape[2]:
        lse = lse[..., segment.tokens]
    if not segment.places:
        lse.fill_(-math.inf)
    elif segment.first:
        lse.copy_(segment.places[0].take(lses[segment.places[0].part], 2))
    for place in places:
        _merge_(total, lse, place.take(outs[place.part]), place.take(lses[place.part], 2))
    if total is not target:
        target.copy_(total)


def _merge_(out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
    """Merge a part in place into the running out [q, b, h, e] in float32 (or float64) and lse [b,
    h, q] in `lse_dtype`.

        out += sigmoid(lse_part - lse) * (out_part - out);  lse = log(exp(lse) + exp(lse_part)).

    A query that saw no key on one side (lse -inf) keeps the other side's values; on neither side,
    out is 0 and lse -inf.
    """
    # The bound keeps -inf - -inf, which is NaN, away: a part whose queries saw no key has weight 0.
    weight = lse_part.sub(lse.clamp_min(_UNSEEN)).sigmoid_().permute(2, 0, 1)
    # In the order of out, in which `lerp_` takes half the time.
    weight = weight.to(out.dtype, memory_format=torch.contiguous_format)
    if out_part.dtype != out.dtype:
        out_part = out_part.to(out.dtype)
    out.lerp_(out_part, weight.unsqueeze(3))
    torch.logaddexp(lse, lse_part, out=lse)
