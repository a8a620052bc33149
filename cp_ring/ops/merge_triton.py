# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The merge in place, as one Triton kernel that passes over memory once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_Q = 16


# Arguments that depend on the number of tokens. Triton would compile again for those that are 1 or divisible by 16.
_VARYING = ["tokens", "lse_b", "lse_h", "tile_lse_b", "tile_lse_h"]


@triton.jit(do_not_specialize=_VARYING)
def _merge(
    out, lse, out_tile, lse_tile, tokens, size,
    out_b, out_q, out_h, lse_b, lse_h, lse_q, tile_b, tile_q, tile_h, tile_e, tile_lse_b, tile_lse_h, tile_lse_q,
    BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program merges BLOCK_Q queries of one head. Strides count elements; the last dimension of out is contiguous."""
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    live = q < tokens
    lse_at = lse + b * lse_b + h * lse_h + q * lse_q
    ours = tl.load(lse_at, mask=live, other=float("-inf"))
    theirs_at = lse_tile + b * tile_lse_b + h * tile_lse_h + q * tile_lse_q
    theirs = tl.load(theirs_at, mask=live, other=float("-inf")).to(tl.float32)
    # -inf - -inf would be NaN: a query that has seen no key counts from 0.
    top = tl.maximum(ours, theirs)
    base = tl.where(top == float("-inf"), 0.0, top)
    our_part, their_part = tl.exp(ours - base), tl.exp(theirs - base)
    total = our_part + their_part
    seen = total > 0.0
    tl.store(lse_at, tl.where(seen, base + tl.log(tl.where(seen, total, 1.0)), float("-inf")), mask=live)
    weight = tl.where(seen, their_part / tl.where(seen, total, 1.0), 0.0)[:, None]
    e = tl.arange(0, BLOCK_E)
    inside = live[:, None] & (e < size)[None, :]
    out_at = out + b * out_b + h * out_h + q[:, None] * out_q + e[None, :]
    old = tl.load(out_at, mask=inside, other=0.0)
    new_at = out_tile + b * tile_b + h * tile_h + q[:, None] * tile_q + e[None, :] * tile_e
    new = tl.load(new_at, mask=inside, other=0.0).to(tl.float32)
    # A part of weight 0 is ignored, because it may hold NaN.
    tl.store(out_at, tl.where(weight > 0.0, old + weight * (new - old), old), mask=inside)


def merge_(out: Tensor, lse: Tensor, out_tile: Tensor, lse_tile: Tensor) -> None:
    """As `cp_ring.ops.merge.merge_`, for float32 out and lse. The last dimension of out is contiguous, and out is not empty."""
    b, tokens, heads, size = out.shape
    grid = (triton.cdiv(tokens, _BLOCK_Q), heads, b)
    _merge[grid](
        out, lse, out_tile, lse_tile, tokens, size,
        *out.stride()[:3], *lse.stride(), *out_tile.stride(), *lse_tile.stride(),
        BLOCK_Q=_BLOCK_Q, BLOCK_E=triton.next_power_of_2(size),
    )  # fmt: skip
