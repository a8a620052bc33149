"""The online-softmax merge of partial results (out, lse), several in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.ops.fused import FusedFunction
from cp_ring.ops.segments import Segments
from cp_ring.runtime import RUNTIME

_UNSEEN = -1e30
"""A number below the lse of any query that saw a key."""

_fused = RUNTIME.of_process(FusedFunction("cp_ring.ops.merge_triton", "merge"))


def merge(
    segments: Segments,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    running: Tensor,
    lse: Tensor,
    result: Tensor,
) -> None:
    """Run one update: merge partial `outs` [b, t, h, e] and `lses` [b, h, t], one by one, with the
    stored total, and store the new one. A part's weight w is its share of the softmax:

        w = sigmoid(lse_part - lse)
        out += w * (out_part - out)
        lse = log(exp(lse) + exp(lse_part))

    A query that saw no key on one side (lse -inf) keeps the other side's values; on neither side,
    out is 0 and lse -inf.

    `running` [b, kept, h, e] holds out in `sum_dtype` between updates, `lse` [b, h, s] the running
    lse in `lse_dtype`. Complete tokens go to `result` [b, s, h, e], which is empty if there are
    none; it may be `running` itself. Tokens that no part has get 0 and -inf. On CUDA, with Triton,
    it is one kernel.
    """
    fits = result.is_cuda and lse.dtype == torch.float32 and segments.parts > 0
    if fits and _fused.run(segments, outs, lses, running, lse, result):
        return
    for segment in segments.each:
        target, total, places = segment.begin(outs, running, result, 1)
        total_lse, *_ = segment.begin(lses, lse, lse, 2, empty=-math.inf)
        for place in places:
            out_part, lse_part = segment.take(place, outs, 1), segment.take(place, lses, 2)
            # in the order of out, in which `lerp_` takes half the time
            weight = total.new_empty(total.shape[:3])
            # The bound keeps -inf - -inf, which is NaN, away: a part whose queries saw no key has
            # weight 0.
            torch.sub(lse_part, total_lse.clamp_min(_UNSEEN), out=weight.transpose(1, 2))
            total.lerp_(out_part.to(total.dtype), weight.sigmoid_().unsqueeze(3))
            torch.logaddexp(total_lse, lse_part, out=total_lse)
        if total is not target:
            target.copy_(total)
