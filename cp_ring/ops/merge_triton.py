# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The merge of partial results, as one Triton kernel that passes over memory once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.ops.blocks_triton import (
    MAX_PARTS,
    load_tokens,
    padded,
    store_tokens,
    strides_of,
    tokens_in_part,
)
from cp_ring.ops.segments import BLOCK_Q, Segments

# Strides and places that depend on the number of tokens. Triton would compile again for those that
# are 1 or divisible by 16.
_VARYING = ["kept", "lse_b", "lse_h", *(f"lse_{what}{i}" for what in "bh" for i in range(4))]


@triton.jit
def _with_part(
    total, total_lse, out, lse, entry, count, at_b, at_h, size, q, b, h, lse_q, lse_b, lse_h,
    BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the total of a block and its lse after one more part."""
    tokens, there = tokens_in_part(entry, count, BLOCK_Q)
    theirs = tl.load(
        lse + at_b * lse_b + at_h * lse_h + tokens * lse_q,
        mask=tl.arange(0, BLOCK_Q) < there,
        other=float("-inf"),
    ).to(tl.float32)
    # -inf - -inf would be NaN: a query that has seen no key counts from 0.
    top = tl.maximum(total_lse, theirs)
    base = tl.where(top == float("-inf"), 0.0, top)
    our_part, their_part = tl.exp(total_lse - base), tl.exp(theirs - base)
    both = our_part + their_part
    seen = both > 0.0
    weight = tl.where(seen, their_part / tl.where(seen, both, 1.0), 0.0)[:, None]
    new = load_tokens(out, tokens, at_b, at_h, there, q, b, h, size, BLOCK_Q, BLOCK_E)
    # A part of weight 0 is ignored, because it may hold NaN; so is a total of weight 0.
    total = tl.where(
        weight > 0.0, tl.where(weight == 1.0, new, total + weight * (new - total)), total
    )
    return total, tl.where(seen, base + tl.log(tl.where(seen, both, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=_VARYING)
def _merge(
    table, kept, running, lse, result, out0, lse0, out1, lse1, out2, lse2, out3, lse3,
    stride_q, stride_b, stride_h, size, heads, lse_b, lse_h,
    q0, b0, h0, q1, b1, h1, q2, b2, h2, q3, b3, h3,
    lse_b0, lse_h0, lse_q0, lse_b1, lse_h1, lse_q1, lse_b2, lse_h2, lse_q2, lse_b3, lse_h3, lse_q3,
    PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program merges the parts of one block of the table, for one head; strides in elements."""
    # Neighboring programs take the heads of one block, whose tokens lie side by side in memory.
    entry = table + tl.program_id(0) // heads * (4 + 2 * PARTS)
    h, b = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(1).to(tl.int64)
    start, end = tl.load(entry), tl.load(entry + 1)
    first, last = tl.load(entry + 2), tl.load(entry + 3)
    count, at = end - start, start.to(tl.int64) + tl.arange(0, BLOCK_Q)
    at_stored, stored = at - kept, tl.where(first == 1, 0, count)
    lse_at = lse + b * lse_b + h * lse_h + at
    total = load_tokens(
        running, at_stored, b, h, stored, stride_q, stride_b, stride_h, size, BLOCK_Q, BLOCK_E
    )
    total_lse = tl.load(lse_at, mask=tl.arange(0, BLOCK_Q) < stored, other=float("-inf"))
    total, total_lse = _with_part(
        total, total_lse, out0, lse0, entry + 4, count, b, h, size,
        q0, b0, h0, lse_q0, lse_b0, lse_h0,
        BLOCK_Q, BLOCK_E,
    )  # fmt: skip
    if PARTS > 1:
        total, total_lse = _with_part(
            total, total_lse, out1, lse1, entry + 6, count, b, h, size,
            q1, b1, h1, lse_q1, lse_b1, lse_h1,
            BLOCK_Q, BLOCK_E,
        )  # fmt: skip
    if PARTS > 2:
        total, total_lse = _with_part(
            total, total_lse, out2, lse2, entry + 8, count, b, h, size,
            q2, b2, h2, lse_q2, lse_b2, lse_h2,
            BLOCK_Q, BLOCK_E,
        )  # fmt: skip
    if PARTS > 3:
        total, total_lse = _with_part(
            total, total_lse, out3, lse3, entry + 10, count, b, h, size,
            q3, b3, h3, lse_q3, lse_b3, lse_h3,
            BLOCK_Q, BLOCK_E,
        )  # fmt: skip
    tl.store(lse_at, total_lse, mask=tl.arange(0, BLOCK_Q) < count)
    done, stays = tl.where(last == 1, count, 0), tl.where(last == 1, 0, count)
    store_tokens(
        result, total, at, b, h, done, stride_q, stride_b, stride_h, size, BLOCK_Q, BLOCK_E
    )
    store_tokens(
        running, total, at_stored, b, h, stays, stride_q, stride_b, stride_h, size, BLOCK_Q, BLOCK_E
    )


def merge(
    segments: Segments,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    running: Tensor | None,
    lse: Tensor,
    result: Tensor,
) -> None:
    """Run `cp_ring.ops.merge.merge`. `lse` is contiguous; `running` and `result`
    have tokens first in memory.
    """
    table, kept = segments.blocks(result.device), segments.kept.start
    running, kept = (result, 0) if running is None else (running, kept)
    (b, _, heads, size), parts = running.shape, len(outs)
    outs, lses = padded(outs), [*lses] + [lses[-1]] * (MAX_PARTS - len(lses))
    pairs = [x for pair in zip(outs, lses, strict=True) for x in pair]
    strides = [stride for out in outs for stride in strides_of(out, 1)]
    # As in `sums_triton.add`: ptxas would spill to have 80 registers on sm_80.
    _merge[(len(table) * heads, b)](
        table, kept, running, lse, result, *pairs,
        *strides_of(running, 1), size, heads, *lse.stride()[:2], *strides,
        *(stride for x in lses for stride in x.stride()),
        PARTS=parts, BLOCK_Q=BLOCK_Q, BLOCK_E=triton.next_power_of_2(size), maxnreg=255,
    )  # fmt: skip
