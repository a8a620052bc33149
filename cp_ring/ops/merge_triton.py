# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The merge of partial results, as one Triton kernel that passes over memory once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.ops.blocks_triton import (
    MAX_PARTS,
    Tokens,
    block_of,
    block_size,
    launch,
    load_tokens,
    places_in_part,
    store_tokens,
    tokens_of,
)
from cp_ring.ops.segments import BLOCK_Q, Segments

_VARYING = ["kept", "lse_b", "lse_h", *(f"{what}{i}" for what in "bhq" for i in range(MAX_PARTS))]
"""Strides and places that depend on the number of tokens. Triton would compile again for those that
are 1 or divisible by 16, and always does so for numbers in a tuple.
"""


@triton.jit(do_not_specialize=_VARYING)
def _merge(
    table, kept, running, result, lse, outs, lses, lse_b, lse_h,
    b0, h0, q0, b1, h1, q1, b2, h2, q2, b3, h3, q3, heads,
    PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program merges the parts of one block of the table, for one head. `b0` to `q3` are the
    strides of `lses`.
    """
    strides_b, strides_h, strides_q = (b0, b1, b2, b3), (h0, h1, h2, h3), (q0, q1, q2, q3)
    entry, b, h, count, at, stored, done = block_of(table, heads, PARTS, BLOCK_Q)
    block = tl.arange(0, BLOCK_Q)
    lse_at = lse + b * lse_b + h * lse_h + at
    total = load_tokens(running, at - kept, b, h, stored, BLOCK_Q, BLOCK_E)
    total_lse = tl.load(lse_at, mask=block < stored, other=float("-inf"))
    for i in tl.static_range(PARTS):
        places, there = places_in_part(entry + 2 * i, count, BLOCK_Q)
        theirs = tl.load(
            lses[i] + b * strides_b[i] + h * strides_h[i] + places * strides_q[i],
            mask=block < there,
            other=float("-inf"),
        ).to(tl.float32)
        # -inf - -inf would be NaN: a query that has seen no key counts from 0.
        top = tl.maximum(total_lse, theirs)
        base = tl.where(top == float("-inf"), 0.0, top)
        our_part, their_part = tl.exp(total_lse - base), tl.exp(theirs - base)
        both = our_part + their_part
        seen = both > 0.0
        weight = tl.where(seen, their_part / tl.where(seen, both, 1.0), 0.0)[:, None]
        new = load_tokens(outs[i], places, b, h, there, BLOCK_Q, BLOCK_E)
        # A part of weight 0 is ignored, because it may hold NaN; so is a total of weight 0.
        total = tl.where(
            weight > 0.0, tl.where(weight == 1.0, new, total + weight * (new - total)), total
        )
        total_lse = tl.where(seen, base + tl.log(tl.where(seen, both, 1.0)), float("-inf"))
    tl.store(lse_at, total_lse, mask=block < count)
    store_tokens(result, total, at, b, h, done, BLOCK_Q, BLOCK_E)
    store_tokens(running, total, at - kept, b, h, count - done, BLOCK_Q, BLOCK_E)


def merge(
    segments: Segments,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    running: Tensor,
    lse: Tensor,
    result: Tensor,
) -> None:
    """Run `cp_ring.ops.merge.merge`. `lse` is contiguous; `running` and `result`
    have tokens first in memory, so their strides are equal.
    """
    table = segments.blocks.on(result.device)
    kept = 0 if running is result else segments.kept.start
    (b, _, heads, size), total = running.shape, tokens_of(running, 1)
    complete, merged = Tokens(result, *total[1:]), [tokens_of(out, 1) for out in outs]
    strides = [stride for x in lses for stride in x.stride()]
    lse_b, lse_h, _ = lse.stride()
    launch(
        _merge, (table.size(0) * heads, b, 1),
        (table, kept, total, complete, lse, tuple(merged), tuple(lses), lse_b, lse_h,
         *strides, *[0] * (3 * MAX_PARTS - len(strides)), heads),
        [total, complete, *merged], [table, lse, *lses], max(lse_b, *strides),
        PARTS=len(outs), BLOCK_Q=BLOCK_Q, BLOCK_E=block_size(size),
    )  # fmt: skip
