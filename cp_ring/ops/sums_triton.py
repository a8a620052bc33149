# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The sum of partial gradients, as one Triton kernel that passes over memory once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.ops.blocks_triton import (
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


@triton.jit(do_not_specialize=["kept"])
def _add(
    table, kept, running, results, parts, heads,
    PARTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCKS_D: tl.constexpr,
):  # fmt: skip
    """results = running + partial gradients, for one block of tokens and one head of one total.

    `table` [blocks, 4 + 2 * PARTS] is that of the update, and `running` begins with token `kept`.
    """
    entry, b, h, count, at, stored, done = block_of(table, heads, PARTS, BLOCK_Q)
    for x in tl.static_range(len(BLOCKS_D)):
        if tl.program_id(2) == x:
            total = load_tokens(running[x], at - kept, b, h, stored, BLOCK_Q, BLOCKS_D[x])
            for i in tl.static_range(PARTS):
                places, there = places_in_part(entry + 2 * i, count, BLOCK_Q)
                total += load_tokens(parts[i][x], places, b, h, there, BLOCK_Q, BLOCKS_D[x])
            store_tokens(results[x], total, at, b, h, done, BLOCK_Q, BLOCKS_D[x])
            store_tokens(running[x], total, at - kept, b, h, count - done, BLOCK_Q, BLOCKS_D[x])


def add(
    segments: Segments,
    parts: Sequence[Sequence[Tensor]],
    running: Sequence[Tensor],
    results: Sequence[Tensor],
    dim: int = 0,
) -> None:
    """Run `cp_ring.ops.sums.add`. `running` and `results` have tokens first in memory, so their
    strides are equal.
    """
    table = segments.blocks.on(results[0].device)
    stored = complete = tuple([tokens_of(x, dim) for x in running])
    kept = 0
    if running[0] is not results[0]:
        kept = segments.kept.start
        complete = tuple([Tokens(x, *of[1:]) for of, x in zip(stored, results, strict=True)])
    added = tuple([tuple([tokens_of(x, dim) for x in part]) for part in parts])
    b, (heads, _) = parts[0][0].shape[1 - dim], parts[0][0].shape[2:]
    launch(
        _add, (table.size(0) * heads, b, len(stored)),
        (table, kept, stored, complete, added, heads),
        [*stored, *complete, *chain(*added)], [table],
        PARTS=len(parts), BLOCK_Q=BLOCK_Q, BLOCKS_D=tuple([block_size(of.size) for of in stored]),
    )  # fmt: skip
