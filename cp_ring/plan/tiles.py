"""Tiles: rectangles of the score matrix, each cut by a diagonal band.

A tile allows query row q and key column k where `q0 <= q < q1`, `k0 <= k < k1` and `lo <= k - q <= hi`. The same type
describes a mask (rows and columns are token positions) and a hop's work (rows of a rank's shard, rows of a key buffer).

Many tiles are one `[6, count]` array, because a plan for packed documents on many ranks has millions of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, order

OPEN = 1 << 60
"""A bound that never cuts."""


class Tile(NamedTuple):
    """One tile, for people and kernels. `lo` of -OPEN and `hi` of OPEN leave that side unbounded."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -OPEN
    hi: int = OPEN

    @property
    def is_full(self) -> bool:
        return self.lo == -OPEN and self.hi == OPEN

    @property
    def is_causal(self) -> bool:
        """A square cut by its main diagonal: row i sees columns 0 to i."""
        return self.lo == -OPEN and self.hi == self.k0 - self.q0 and self.q1 - self.q0 == self.k1 - self.k0


class Tiles:
    """A frozen batch of tiles; iterating yields `Tile`."""

    __slots__ = ("data",)

    def __init__(self, data: Ints):
        assert data.ndim == 2 and data.shape[0] == 6 and data.dtype == np.int64
        self.data = data

    @classmethod
    def of(cls, rows: Iterable[Tile | tuple[int, ...]]) -> Tiles:
        """Tiles from an iterable of (q0, q1, k0, k1, lo, hi)."""
        return cls(np.array(list(rows), dtype=np.int64).reshape(-1, 6).T.copy())

    @property
    def q0(self) -> Ints:
        return self.data[0]

    @property
    def q1(self) -> Ints:
        return self.data[1]

    @property
    def k0(self) -> Ints:
        return self.data[2]

    @property
    def k1(self) -> Ints:
        return self.data[3]

    @property
    def lo(self) -> Ints:
        return self.data[4]

    @property
    def hi(self) -> Ints:
        return self.data[5]

    def __len__(self) -> int:
        return self.data.shape[1]

    def __iter__(self) -> Iterator[Tile]:
        return (Tile(*row) for row in self.data.T.tolist())

    def __getitem__(self, index: NDArray[np.generic] | slice) -> Tiles:
        return Tiles(self.data[:, index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiles) and np.array_equal(self.data, other.data)

    def __repr__(self) -> str:
        return f"Tiles({list(self)[:4]}{'...' if len(self) > 4 else ''})"

    def shifted(self, rows: Ints | int, columns: Ints | int) -> Tiles:
        """The same tiles with rows and columns renumbered by adding `rows` and `columns`."""
        q0, q1, k0, k1, lo, hi = self.data
        slide = np.asarray(columns) - np.asarray(rows)
        lo = np.where(lo == -OPEN, lo, lo + slide)
        hi = np.where(hi == OPEN, hi, hi + slide)
        return Tiles(np.stack([q0 + rows, q1 + rows, k0 + columns, k1 + columns, lo, hi]))

    def within(self, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Tiles:
        """Each tile cut to its own rectangle, trimmed; the count stays, empty tiles have `q0 >= q1`."""
        return Tiles(_trim(np.stack([np.maximum(self.q0, q0), np.minimum(self.q1, q1), np.maximum(self.k0, k0),
                                     np.minimum(self.k1, k1), self.lo, self.hi])))  # fmt: skip

    def fitted(self) -> Tiles:
        """Without empty rows and columns, the count unchanged: empty tiles have `q0 >= q1`.

        Bounds that cut nothing become open, so that equal areas compare equal.
        """
        return Tiles(_trim(self.data))

    def trimmed(self) -> Tiles:
        """Fitted, and without empty tiles."""
        fitted = self.fitted()
        return fitted[fitted.q0 < fitted.q1]

    def area(self) -> Ints:
        """Allowed (query, key) pairs of each tile, exactly, int64."""
        full = (self.q1 - self.q0) * (self.k1 - self.k0)
        # Pairs above the band (k - q > hi) and below it (k - q < lo) are triangles with a corner cut off.
        above = _corner(self.q1 - self.q0, self.k1 - self.k0, self.k1 - 1 - self.q0 - self.hi)
        below = _corner(self.q1 - self.q0, self.k1 - self.k0, self.lo - (self.k0 - (self.q1 - 1)))
        return full - above - below


def _corner(height: Ints, width: Ints, depth: Ints) -> Ints:
    """Cells of a height x width grid whose diagonal distance from one corner is below `depth`."""
    depth = np.clip(depth, 0, height + width - 1)

    def triangle(side: Ints) -> Ints:
        side = np.maximum(side, 0)
        return side * (side + 1) // 2

    return triangle(depth) - triangle(depth - height) - triangle(depth - width)


def _trim(data: Ints) -> Ints:
    q0, q1, k0, k1, lo, hi = data
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    lo = np.where(lo <= k0 - (q1 - 1), -OPEN, lo)
    hi = np.where(hi >= k1 - 1 - q0, OPEN, hi)
    # An empty column range or band empties the rows too, so that `q0 < q1` alone tells a live tile.
    q1 = np.where((k0 < k1) & (data[4] <= data[5]), q1, q0)
    return np.stack([q0, q1, k0, k1, lo, hi])


def coalesce(tiles: Tiles, group: Ints) -> tuple[Tiles, Ints]:
    """Joins neighbors of the same group whose union is one tile, as the two chunks of a zigzag shard often are.

    `group` numbers each tile's group; the result is sorted by (group, q0, k0).
    """
    for rows in (False, True, False):
        while True:
            sort = order(group, tiles.k0, tiles.q0) if rows else order(group, tiles.q0, tiles.k0)
            tiles, group = tiles[sort], group[sort]
            joined, first = _join_pairs(tiles, group, rows)
            if not len(first):
                break
            data, keep = tiles.data.copy(), np.ones(len(tiles), bool)
            data[:, first], keep[first + 1] = joined.data, False
            tiles, group = Tiles(data[:, keep]), group[keep]
    return tiles, group


def _join_pairs(tiles: Tiles, group: Ints, rows: bool) -> tuple[Tiles, Ints]:
    """Disjoint pairs (i, i + 1) that join, as joined tiles and their first indices; neighbors by rows or by columns."""
    a, b = tiles.data[:, :-1], tiles.data[:, 1:]
    near = (group[:-1] == group[1:]) & ((a[1] == b[0]) if rows else (a[3] == b[2]) & (a[0] == b[0]) & (a[1] == b[1]))
    first = np.flatnonzero(near)
    left, right = tiles[first], tiles[first + 1]
    a, b = left.data, right.data
    whole = Tiles(np.stack([np.minimum(a[0], b[0]), np.maximum(a[1], b[1]), np.minimum(a[2], b[2]), np.maximum(a[3], b[3]),
                            np.maximum(a[4], b[4]), np.minimum(a[5], b[5])]))  # fmt: skip
    far = np.full(len(first), OPEN)
    if rows:
        back = [whole.within(t.q0, t.q1, -far, far).data == t.data for t in (left, right)]
    else:
        back = [whole.within(-far, far, t.k0, t.k1).data == t.data for t in (left, right)]
    good = first[back[0].all(0) & back[1].all(0)]
    # A tile joins once a round: keep every other one of a chain of consecutive pairs.
    starts = np.flatnonzero(np.diff(good, prepend=-2) != 1)
    place = np.arange(len(good)) - np.repeat(starts, np.diff(np.append(starts, len(good))))
    good = good[place % 2 == 0]
    return whole[np.searchsorted(first, good)], good
