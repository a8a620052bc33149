# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The sum of partial gradients, as one Triton kernel that passes over memory once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.ops.blocks_triton import load_tokens, padded, store_tokens, strides_of, tokens_in_part
from cp_ring.ops.segments import BLOCK_Q, Segments


@triton.jit(do_not_specialize=["kept"])
def _add(
    table, kept, running, result, part0, part1, part2, part3,
    stride_q, stride_b, stride_h, size, heads,
    q0, b0, h0, q1, b1, h1, q2, b2, h2, q3, b3, h3,
    PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """result = running + up to 4 partial gradients, for one block of tokens and one head.

    `table` [blocks, 4 + 2 * PARTS] is that of the update, and `running` begins with token `kept`.
    Tensors are [tokens, b, h, BLOCK_D]; strides are in elements.
    """
    # Neighboring programs take the heads of one block, whose tokens lie side by side in memory.
    entry = table + tl.program_id(0) // heads * (4 + 2 * PARTS)
    at_h, at_b = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(1).to(tl.int64)
    start, end = tl.load(entry), tl.load(entry + 1)
    first, last = tl.load(entry + 2), tl.load(entry + 3)
    count, at_q = end - start, start.to(tl.int64) + tl.arange(0, BLOCK_Q)
    at_stored = at_q - kept
    total = load_tokens(
        running,
        at_stored,
        at_b,
        at_h,
        tl.where(first == 1, 0, count),
        stride_q,
        stride_b,
        stride_h,
        size,
        BLOCK_Q,
        BLOCK_D,
    )
    tokens, there = tokens_in_part(entry + 4, count, BLOCK_Q)
    total += load_tokens(part0, tokens, at_b, at_h, there, q0, b0, h0, size, BLOCK_Q, BLOCK_D)
    if PARTS > 1:
        tokens, there = tokens_in_part(entry + 6, count, BLOCK_Q)
        total += load_tokens(part1, tokens, at_b, at_h, there, q1, b1, h1, size, BLOCK_Q, BLOCK_D)
    if PARTS > 2:
        tokens, there = tokens_in_part(entry + 8, count, BLOCK_Q)
        total += load_tokens(part2, tokens, at_b, at_h, there, q2, b2, h2, size, BLOCK_Q, BLOCK_D)
    if PARTS > 3:
        tokens, there = tokens_in_part(entry + 10, count, BLOCK_Q)
        total += load_tokens(part3, tokens, at_b, at_h, there, q3, b3, h3, size, BLOCK_Q, BLOCK_D)
    done, stays = tl.where(last == 1, count, 0), tl.where(last == 1, 0, count)
    store_tokens(
        result, total, at_q, at_b, at_h, done, stride_q, stride_b, stride_h, size, BLOCK_Q, BLOCK_D
    )
    store_tokens(
        running,
        total,
        at_stored,
        at_b,
        at_h,
        stays,
        stride_q,
        stride_b,
        stride_h,
        size,
        BLOCK_Q,
        BLOCK_D,
    )


def add(
    segments: Segments,
    parts: Sequence[Tensor],
    running: Tensor | None,
    result: Tensor,
    dim: int = 0,
) -> None:
    """Run `cp_ring.ops.sums.add`. `running` and `result` have tokens first in memory."""
    table, kept = segments.blocks(result.device), segments.kept.start
    running, kept = (result, 0) if running is None else (running, kept)
    count, parts = len(parts), padded(parts)
    b, (heads, size) = running.shape[1 - dim], running.shape[2:]
    strides = [stride for x in parts for stride in strides_of(x, dim)]
    # On sm_100 ptxas would spill three parts to have 48 registers; a limit of all leaves it 64.
    _add[(len(table) * heads, b)](
        table, kept, running, result, *parts, *strides_of(running, dim), size, heads, *strides,
        PARTS=count, BLOCK_Q=BLOCK_Q, BLOCK_D=triton.next_power_of_2(size), maxnreg=255,
    )  # fmt: skip
