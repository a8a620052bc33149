"""The segments of an update (`cp_ring.plan.records.Update`), as torch operations and Triton kernels
read them.

An update adds parts, which are partial results, to a total: one tensor holds the running total in
the dtype of sums, another one the result in its own dtype. If the dtypes are equal, the result
holds both. Else the running total has no memory for tokens at its ends that no update leaves
incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cp_ring.ops.copies import Copies
from cp_ring.ops.dtypes import sum_dtype

BLOCK_Q = 16
"""The number of tokens of one program of a Triton kernel."""


def tokens(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Return `size` tokens of x from token `start` on; tokens are the dimension `dim`."""
    # a view takes the host longer than the question
    return x.narrow(dim, start, size) if size < x.shape[dim] else x


Place = tuple[int, int, bool]


class Segment(NamedTuple):
    """One segment of `size` tokens of a total, from token `start` on, and the parts that are added
    to it. The first update fills it with zeros if it has none.

    stored: its first token in the running total, if it has one there.
    first: nothing has been stored there yet.
    last: the total is complete, and goes to the result.
    places: for each part its number, the place of the segment's first or last token there, and True
    if the part has them in reverse order.
    """

    start: int
    stored: int
    size: int
    first: bool
    last: bool
    places: list[Place]

    def take(self, place: Place, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the segment's tokens of a part, in the order of the total. Tokens are the
        dimension `dim`.
        """
        number, start, reverse = place
        part = tokens(parts[number], dim, start, self.size)
        return part.flip(dim) if reverse else part

    def begin(
        self,
        parts: Sequence[Tensor],
        running: Tensor,
        result: Tensor,
        dim: int,
        empty: float = 0.0,
    ) -> tuple[Tensor, Tensor, list[Place]]:
        """Return the tokens to which the total is stored, the total to start from, and the places
        that are still to be added. The start is the stored total, else the first part, else `empty`
        everywhere; it may be the tokens themselves. `dim` is the dimension of tokens.
        """
        apart, target, start = running is not result, result, self.start
        if apart and not self.last:
            target, start = running, self.stored
        target = tokens(target, dim, start, self.size)
        if not self.first:
            goes_on = apart and self.last
            stored = tokens(running, dim, self.stored, self.size) if goes_on else target
            return target, stored, self.places
        if not self.places:
            return target, target.fill_(empty), self.places
        part, others = self.take(self.places[0], parts, dim), self.places[1:]
        # The sum of several parts is not rounded to the dtype of the result on the way.
        if others and (dtype := sum_dtype(target.dtype)) != target.dtype:
            return target, part.to(dtype, copy=True), others
        return target, target.copy_(part), others


@dataclass(eq=False)
class Segments:
    """The segments of one update. `table`, `whole` and `kept` are those of
    `cp_ring.plan.records.Update`; by default the running total has all tokens.
    """

    table: np.ndarray
    whole: bool = False
    kept: slice = slice(0, None)

    def __post_init__(self) -> None:
        table = self.table
        self.parts = len(table) // 2 - 2
        # Some of the total has the dtype of sums before this update, or after it.
        self.stays = not table[2:4].all()
        # Some of the total is complete after this update.
        self.ends = bool(table[3].any())

    @cached_property
    def each(self) -> list[Segment]:
        """The segments, for torch operations."""
        found = []
        for start, end, first, last, *of_parts in self.table.T.tolist():
            size, stored = end - start, start - self.kept.start
            places = [
                (part, min(position, position + step * (size - 1)), step < 0)
                for part, (position, step) in enumerate(batched(of_parts, 2))
                if step
            ]
            found.append(Segment(start, stored, size, bool(first), bool(last), places))
        return found

    @cached_property
    def blocks(self) -> Copies:
        """The table with its segments cut into blocks of at most BLOCK_Q tokens, for Triton
        kernels: int32 [blocks, 4 + 2 * parts].
        """
        count = -(-(self.table[1] - self.table[0]) // BLOCK_Q)
        which = np.repeat(np.arange(len(count)), count)
        before = (np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)) * BLOCK_Q
        blocks = self.table[:, which]
        blocks[0] += before
        blocks[1] = np.minimum(blocks[1], blocks[0] + BLOCK_Q)
        blocks[4::2] += blocks[5::2] * before
        return Copies(blocks.T.astype(np.int32, order="C"))
