"""Tiles: rectangles of the score matrix, each cut by a diagonal band.

A tile allows query row q and key column k where `q0 <= q < q1`, `k0 <= k < k1` and `lo <= k - q <= hi`. The same type
describes a mask (rows and columns are token positions) and a hop's work (rows of a rank's shard, rows of a key buffer).

Many tiles are one `[6, count]` array, because a plan for packed documents on many ranks has millions of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, overlaps, sort_index

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
        data = self.data.copy()
        data[0:2] += rows
        data[2:4] += columns
        slide = np.asarray(columns) - np.asarray(rows)
        np.add(data[4], slide, out=data[4], where=data[4] != -OPEN)
        np.add(data[5], slide, out=data[5], where=data[5] != OPEN)
        return Tiles(data)

    def within(self, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Tiles:
        """Each tile cut to its own rectangle, fitted; the count stays, empty tiles have `q0 >= q1`."""
        data = self.data.copy()
        np.maximum(data[0], q0, out=data[0])
        np.minimum(data[1], q1, out=data[1])
        np.maximum(data[2], k0, out=data[2])
        np.minimum(data[3], k1, out=data[3])
        return Tiles(_fit(data))

    def fitted(self) -> Tiles:
        """Without empty rows and columns, the count unchanged: empty tiles have `q0 >= q1`.

        Bounds that cut nothing become open, so that equal areas compare equal.
        """
        return Tiles(_fit(self.data.copy()))

    def trimmed(self) -> Tiles:
        """Fitted, and without empty tiles."""
        fitted = self.fitted()
        return fitted[fitted.live()]

    def live(self) -> Ints | slice:
        """Index of the tiles that are not empty, of fitted tiles."""
        live = self.q0 < self.q1
        return slice(None) if live.all() else np.flatnonzero(live)

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


def _fit(data: Ints) -> Ints:
    """Fits tiles in place: see `Tiles.fitted`."""
    q0, q1, k0, k1, lo, hi = data
    empty = lo > hi
    np.maximum(q0, k0 - hi, out=q0)
    np.minimum(q1, k1 - lo, out=q1)
    np.maximum(k0, q0 + lo, out=k0)
    np.minimum(k1, q1 + hi, out=k1)
    lo[lo <= k0 - (q1 - 1)] = -OPEN
    hi[hi >= k1 - 1 - q0] = OPEN
    # An empty column range or band empties the rows too, so that `q0 < q1` alone tells a live tile.
    np.copyto(q1, q0, where=empty | (k0 >= k1))
    return data


def split_at_edges(
    pieces: Tiles, rows: Ints, columns: Ints | None = None, keep: tuple[Ints, Ints] | None = None
) -> tuple[Tiles, Ints, Ints]:
    """Pieces cut at `rows` and `columns` (by default the same edges): (tiles, index of the row cell, of the column cell).

    `keep`, bool arrays of the row and of the column cells, chooses the cells whose tiles are wanted.
    """
    columns = rows if columns is None else columns
    row_cells, column_cells = (np.arange(len(edges) - 1) for edges in (rows, columns))
    if keep is not None:
        row_cells, column_cells = np.flatnonzero(keep[0]), np.flatnonzero(keep[1])
    open_ = np.full(1, OPEN)
    piece, cell = overlaps(pieces.q0, pieces.q1, rows[row_cells], rows[row_cells + 1])
    row_cell = row_cells[cell]
    strips = pieces[piece].within(rows[row_cell], rows[row_cell + 1], -open_, open_)
    live = strips.live()
    strips, row_cell = strips[live], row_cell[live]
    strip, cell = overlaps(strips.k0, strips.k1, columns[column_cells], columns[column_cells + 1])
    column_cell = column_cells[cell]
    tiles = strips[strip].within(-open_, open_, columns[column_cell], columns[column_cell + 1])
    live = tiles.live()
    return tiles[live], row_cell[strip[live]], column_cell[live]


def split_in_half(tiles: Tiles) -> list[tuple[Tiles, Ints]]:
    """The tiles cut at a row that leaves about half of the pairs above it and half below.

    Each half comes with the index of the tile that each of its tiles is part of. The row is a multiple of 128 where
    there are many, because kernels work in blocks of it.
    """
    open_ = np.full(1, OPEN)
    low, high = int(tiles.q0.min(initial=OPEN)), int(tiles.q1.max(initial=0))
    block, total = min(128, max((high - low) // 8, 1)), tiles.area().sum()
    blocks = range(low // block + 1, -(-high // block))
    place = bisect_left(blocks, total, key=lambda i: 2 * tiles.within(-open_, np.full(1, i * block), -open_, open_).area().sum())
    row = np.full(1, blocks[min(place, len(blocks) - 1)] * block if blocks else high)
    parts = [tiles.within(-open_, row, -open_, open_), tiles.within(row, open_, -open_, open_)]
    return [(part[live], live) for part in parts for live in [np.flatnonzero(part.q0 < part.q1)]]


def coalesce(tiles: Tiles, group: Ints) -> tuple[Tiles, Ints]:
    """Joins neighbors of the same group whose union is one tile, as the two chunks of a zigzag shard often are.

    `group` numbers each tile's group; the result is sorted by (group, q0, k0).
    """
    for rows in (False, True, False):
        while True:
            sort = sort_index(group, tiles.k0, tiles.q0) if rows else sort_index(group, tiles.q0, tiles.k0)
            tiles, group = tiles[sort], group[sort]
            joined, first = _join_pairs(tiles, group, rows)
            if not len(first):
                break
            keep = np.delete(np.arange(len(tiles)), first + 1)
            tiles, group = tiles[keep], group[keep]
            tiles.data[:, first - np.arange(len(first))] = joined.data
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
