"""Packed calls: many tiles with one window in one call of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cp_ring.kernels.base import (
    OPEN,
    AttentionKernel,
    Gradients,
    OutLse,
    Packing,
    Room,
    Sizes,
    VarlenKernel,
)
from cp_ring.kernels.queries import Queries
from cp_ring.ops.copies import Copies
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import Pairs
from cp_ring.plan.tiles import Tile
from cp_ring.plan.updates import Partial


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Many sequences with one window in one call. Batch rows become heads: [t, b, h, d] is one
    stream of b * h heads.
    """

    q: _Side
    k: _Side
    left: int
    right: int
    queries: Partial
    keys: Partial

    @classmethod
    def of(
        cls,
        sequences: list[list[tuple[Tile, int]]],
        window: tuple[int, int],
        reverse: bool,
        sizes: Sizes | None,
    ) -> PackedCall:
        """Make the call of sequences of tiles of one window, each with the shift from its keys to
        their gradients.
        """
        tiles = [tile for sequence in sequences for tile in sequence]
        first = [sequence[0][0] for sequence in sequences]
        q, k = [(t.q0, t.q1) for t in first], [(t.k0, t.k1) for t, _ in tiles]
        grads = [(t.k0 + shift, t.k1 + shift) for t, shift in tiles]
        left, right = (-1, 0) if reverse else window
        queries, keys = Partial.of(q, reverse=reverse), Partial.of(grads, reverse=reverse)
        of_q, of_k = (
            sizes.rooms(_count(q), _count(k), len(sequences)) if sizes else (Room(), Room())
        )
        lengths = [sum(t.k1 - t.k0 for t, _ in sequence) for sequence in sequences]
        return cls(
            _Side.of(q, [q1 - q0 for q0, q1 in q], reverse, of_q),
            _Side.of(k, lengths, reverse, of_k),
            left,
            right,
            queries,
            keys,
        )

    def pairs(self) -> Pairs:
        of_q, of_k = (side.ends.values.astype(np.int64) for side in (self.q, self.k))
        lengths, widths = np.diff(of_q), np.diff(of_k)
        corner = widths - lengths  # windows are aligned bottom right
        lo = np.full(len(corner), -OPEN) if self.left < 0 else corner - self.left
        hi = np.full(len(corner), OPEN) if self.right < 0 else corner + self.right
        queries, keys = (side.tokens.tokens()[: side.count] for side in (self.q, self.k))
        return Pairs(queries, keys, of_q, of_k, lo, hi)

    def prepare(self, device: torch.device) -> None:
        for side in (self.q, self.k):
            side.tokens.prepare(device)
            side.ends.on(device)

    def attend(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> OutLse:
        (q,), count, heads = queries.flat, self.q.count, (k.shape[1], -1)
        q, k, v = self.q.tokens.take(q), *(self.k.tokens.take(x).flatten(1, 2) for x in (k, v))
        out, lse = cast(VarlenKernel, kernel).forward_varlen(
            q, k, v, self._packing(q.device), scale
        )
        out = out[:count].unflatten(1, heads).transpose(0, 1)
        return out, lse[:, :count].unflatten(0, heads)

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> Gradients:
        assert queries.lse is not None, "a backward pass has no lse"
        b, mine = k.shape[1], self.q.tokens
        dout, q, out = (mine.take(x) for x in queries.flat)
        k, v = (self.k.tokens.take(x).flatten(1, 2) for x in (k, v))
        lse = mine.take(queries.lse, 2).contiguous().flatten(0, 1)
        grads = cast(VarlenKernel, kernel).backward_varlen(
            dout, q, k, v, out, lse, self._packing(k.device), scale
        )
        counts = self.q.count, self.k.count, self.k.count
        dq, dk, dv = (
            x[:count].unflatten(1, (b, -1)) for x, count in zip(grads, counts, strict=True)
        )
        return dq.transpose(0, 1), dk, dv

    def _packing(self, device: torch.device) -> Packing:
        cu_q, cu_k = self.q.ends.on(device), self.k.ends.on(device)
        return Packing(cu_q, cu_k, self.q.longest, self.k.longest, self.left, self.right)


def _count(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


@dataclass(frozen=True, eq=False)
class _Side:
    """The queries of a packed call, or its keys.

    tokens: the tokens of the buffer, in the order of the call.
    ends: where each sequence ends, int32 [sequences + 1].
    longest: the tokens of the longest sequence, or more.
    count: the tokens of all sequences, after which the call may have tokens of none.
    """

    tokens: _Tokens
    ends: Copies
    longest: int
    count: int

    @classmethod
    def of(
        cls, spans: list[tuple[int, int]], lengths: list[int], reverse: bool, room: Room
    ) -> _Side:
        """Take the tokens of `spans` as sequences of these lengths, and fill them up to `room`."""
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        empty = max(room.sequences - len(lengths), 0)
        return cls(
            _Tokens.of(spans, reverse, room.tokens),
            Copies(np.pad(ends, (0, empty), mode="edge")),
            max(*lengths, room.longest),
            int(ends[-1]),
        )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens of a buffer in the order of a packed call: a slice if the buffer has this order, else
    an index.
    """

    span: slice
    index: Copies | None

    @classmethod
    def of(cls, spans: list[tuple[int, int]], reverse: bool, least: int) -> _Tokens:
        """Take the tokens of `spans`, then token 0 until there are at least `least`."""
        missing = least - _count(spans)
        if not reverse and missing <= 0 and all(a[1] == b[0] for a, b in pairwise(spans)):
            return cls(slice(spans[0][0], spans[-1][1]), None)
        parts = [np.arange(start, end)[:: -1 if reverse else 1] for start, end in spans]
        index = np.concatenate([*parts, np.zeros(max(missing, 0), np.int64)])
        return cls(slice(0, 0), Copies(index))

    def tokens(self) -> Ints:
        return np.arange(self.span.start, self.span.stop) if not self.index else self.index.values

    def prepare(self, device: torch.device) -> None:
        if self.index:
            self.index.on(device)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the tokens of x: a view of a slice, or a copy by index."""
        if not self.index:
            return x.narrow(dim, self.span.start, self.span.stop - self.span.start)
        return x.index_select(dim, self.index.on(x.device))
