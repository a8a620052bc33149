# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The sum of partial gradients, as one Triton kernel that passes over memory once."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.ops.blocks_triton import (
    block_of,
    load_tokens,
    places_in_part,
    store_tokens,
    tokens_of,
)
from cp_ring.ops.segments import BLOCK_Q, Segments


@triton.jit(do_not_specialize=["kept"])
def _add(
    table,
    kept,
    running,
    result,
    parts,
    size,
    heads,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """result = running + partial gradients, for one block of tokens and one head.

    `table` [blocks, 4 + 2 * PARTS] is that of the update, and `running` begins with token `kept`.
    """
    entry, b, h, count, at, stored, done = block_of(table, heads, PARTS, BLOCK_Q)
    total = load_tokens(running, at - kept, b, h, stored, size, BLOCK_Q, BLOCK_D)
    for i in tl.static_range(PARTS):
        places, there = places_in_part(entry + 2 * i, count, BLOCK_Q)
        total += load_tokens(parts[i], places, b, h, there, size, BLOCK_Q, BLOCK_D)
    store_tokens(result, total, at, b, h, done, size, BLOCK_Q, BLOCK_D)
    store_tokens(running, total, at - kept, b, h, count - done, size, BLOCK_Q, BLOCK_D)


def add(
    segments: Segments,
    parts: Sequence[Tensor],
    running: Tensor | None,
    result: Tensor,
    dim: int = 0,
) -> None:
    """Run `cp_ring.ops.sums.add`. `running` and `result` have tokens first in memory, so their
    strides are equal.
    """
    table, kept = segments.blocks(result.device), segments.kept.start
    running, kept = (result, 0) if running is None else (running, kept)
    b, (heads, size), total = running.shape[1 - dim], running.shape[2:], tokens_of(running, dim)
    # On sm_100 ptxas would spill three parts to have 48 registers; a limit of all leaves it 64.
    _add[(len(table) * heads, b)](
        table,
        kept,
        total,
        total._replace(x=result),
        tuple(tokens_of(part, dim) for part in parts),
        size,
        heads,
        PARTS=len(parts),
        BLOCK_Q=BLOCK_Q,
        BLOCK_D=triton.next_power_of_2(size),
        maxnreg=255,
    )
