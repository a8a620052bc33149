"""The online-softmax merge of partial results (out, lse), several in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.ops.fused import FusedFunction
from cp_ring.ops.segments import Segment, Segments

_fused = FusedFunction("cp_ring.ops.merge_triton", "merge")


def merge(
    segments: Segments, outs: Sequence[Tensor], lses: Sequence[Tensor], running: Tensor | None, lse: Tensor, result: Tensor
) -> None:
    """One update: merges partial `outs` [t, b, h, e] and `lses` [b, h, t], one by one, with what is stored; stores the total.

    `running` [s, b, h, e] holds out in `sum_dtype` between updates, `lse` [b, h, s] the running lse in `lse_dtype`. What is
    complete goes to `result` [s, b, h, e], which may be `running`. Without `running`, everything is complete after this
    update. Tokens that no part has get 0 and -inf. On CUDA, with Triton, it is one kernel.
    """
    fits = result.is_cuda and lse.dtype == torch.float32 and segments.parts > 0
    if not (fits and _fused.run(segments.blocks(result.device), outs, lses, running, lse, result)):
        for segment in segments:
            merge_segment(segment, outs, lses, running, lse, result)


def merge_segment(
    segment: Segment, outs: Sequence[Tensor], lses: Sequence[Tensor], running: Tensor | None, lse: Tensor, result: Tensor
) -> None:
    """One segment of `merge`, in torch operations."""
    target, lse = segment.target(running, result), lse[..., segment.tokens]
    if not segment.places:
        target.zero_()
        lse.fill_(-math.inf)
        return
    total, places = segment.begin(outs, running, target)
    if segment.first:
        lse.copy_(segment.places[0].take(lses[segment.places[0].part], 2))
    if places:
        _merge_(total, lse, [x.take(outs[x.part]) for x in places], [x.take(lses[x.part], 2) for x in places])
    if total is not target:
        target.copy_(total)


def merge_(out: Tensor, lse: Tensor, out_tile: Tensor, lse_tile: Tensor) -> None:
    """Merges one tile in place: the running out [b, q, h, e] in float32 (or float64) and lse [b, h, q] in `lse_dtype`.

    out += sigmoid(lse_tile - lse) * (out_tile - out);  lse = log(exp(lse) + exp(lse_tile)).
    A query that saw no key on one side (lse -inf) keeps the other side's values; on neither side, out is 0 and lse -inf.
    """
    _merge_(out.transpose(0, 1), lse, [out_tile.transpose(0, 1)], [lse_tile])


def _merge_(out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """`merge_` of parts one by one, for tensors with tokens first. Their weights are computed together."""
    theirs = torch.stack(list(lses)).to(lse.dtype)
    ours = [lse]
    for part in theirs.unbind():
        ours.append(torch.logaddexp(ours[-1], part))
    weights = theirs.sub(torch.stack(ours[:-1])).sigmoid_()
    # -inf - -inf is NaN: the weight of such a query is 0.
    weights = weights.masked_fill_(theirs == -math.inf, 0.0).to(out.dtype).permute(0, 3, 1, 2)[..., None]
    for part, weight in zip(outs, weights.unbind(), strict=True):
        out.lerp_(part.to(out.dtype), weight)
    lse.copy_(ours[-1])
