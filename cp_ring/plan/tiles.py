"""Tiles: rectangles of the score matrix, each cut by a diagonal band.

A tile allows query q and key k if `q0 <= q < q1`, `k0 <= k < k1` and `lo <= k - q <= hi`. The same
type describes a mask (queries and keys are token positions) and a hop's work (queries are tokens of
a rank's shard, keys tokens of a buffer).

Many tiles are one `[6, count]` array, because a plan for packed documents on many ranks has
millions of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, integers, overlaps, sort_index

OPEN = 1 << 60
"""An open bound of a band: it cuts nothing."""


class Tile(NamedTuple):
    """One tile, for people and kernels. `lo` = -OPEN or `hi` = OPEN leaves that side unbounded.

        causal = Tile(q0=0, q1=512, k0=0, k1=512, hi=0)

    Its queries are q0 <= q < q1, its keys k0 <= k < k1, and its band is lo <= k - q <= hi.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -OPEN
    hi: int = OPEN


def _column(index: int) -> Ints:
    """Return a property of tiles that is one column of them, int64 [count]."""
    column: Any = property(lambda tiles: tiles.data[index])
    return column


class Tiles:
    """Tiles as one int64 array `data` [6, count]: q0, q1, k0, k1, lo, hi. Iterates over `Tile`s.

        tiles = Tiles.of([Tile(0, 512, 0, 256), Tile(0, 512, 256, 512, hi=0)])

    `of` makes them from rows of six numbers, `columns` from six columns.
    """

    __slots__ = ("data",)

    def __init__(self, data: Ints):
        assert data.ndim == 2 and data.shape[0] == 6 and data.dtype == np.int64
        self.data = data

    @classmethod
    def of(cls, tiles: Iterable[Tile | tuple[int, ...]]) -> Tiles:
        """Tiles from rows (q0, q1, k0, k1, lo, hi), whose numbers are those of `Tile`: queries q0
        <= q < q1, keys k0 <= k < k1, lo <= k - q <= hi. Bounds beyond +-`OPEN` become open.
        """
        data = integers(list(tiles), "pieces").reshape(-1, 6).T.copy()
        empty = data[4] > data[5]
        np.clip(data[4:], -OPEN, OPEN, out=data[4:])
        data[5] -= empty & (data[4] == data[5])  # so that it stays empty
        return cls(data)

    q0, q1, k0, k1, lo, hi = map(_column, range(6))

    @property
    def banded(self) -> NDArray[np.bool_]:
        """True for fitted tiles of which a band cuts a part off, bool [count]."""
        return (self.lo != -OPEN) | (self.hi != OPEN)

    def __len__(self) -> int:
        return self.data.shape[1]

    def __iter__(self) -> Iterator[Tile]:
        return (Tile(*numbers) for numbers in self.data.T.tolist())

    def __getitem__(self, index: NDArray[np.generic] | slice) -> Tiles:
        if isinstance(index, slice):
            return Tiles(self.data[:, index])
        places = (
            np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64, copy=False)
        )
        return Tiles(self.data.take(places, axis=1))  # which is faster than indexing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiles) and np.array_equal(self.data, other.data)

    def __repr__(self) -> str:
        return f"Tiles({list(self)[:4]}{'...' if len(self) > 4 else ''})"

    def shifted(self, queries: Ints | int, keys: Ints | int) -> Tiles:
        """Return the same tiles with `queries` added to query positions and `keys` to key
        positions.
        """
        data = self.data.copy()
        data[0:2] += queries
        data[2:4] += keys
        slide = np.asarray(keys) - np.asarray(queries)
        np.add(data[4:], slide, out=data[4:], where=np.abs(data[4:]) != OPEN)
        return Tiles(data)

    @classmethod
    def columns(
        cls,
        q0: Ints | int,
        q1: Ints,
        k0: Ints | int,
        k1: Ints | int,
        lo: Ints | int = -OPEN,
        hi: Ints | int = OPEN,
    ) -> Tiles:
        """Make tiles from their columns. Each is int64 [count]; all but `q1` may be one number for
        all tiles.
        """
        columns = np.broadcast_arrays(q0, q1, k0, k1, lo, hi)
        return cls(np.array(columns, np.int64))

    @classmethod
    def concatenate(cls, *tables: Tiles) -> Tiles:
        """The tiles of all tables, one table after another."""
        return cls(np.concatenate([tiles.data for tiles in tables], axis=1))

    def within(
        self,
        q0: Ints | int = -OPEN,
        q1: Ints | int = OPEN,
        k0: Ints | int = -OPEN,
        k1: Ints | int = OPEN,
    ) -> Tiles:
        """Return each tile cut to its own rectangle and fitted. The count stays; empty tiles have
        `q0 >= q1`.
        """
        data = self.data.copy()
        for row, start, end in ((0, q0, q1), (2, k0, k1)):
            np.maximum(data[row], start, out=data[row])
            np.minimum(data[row + 1], end, out=data[row + 1])
        return Tiles(_fit(data))

    def fitted(self) -> Tiles:
        """Return the tiles without queries that see no key and keys that no query sees. The count
        stays; empty tiles have `q0 >= q1`.

        Bounds that cut nothing become open, so that equal areas compare equal.
        """
        return Tiles(_fit(self.data.copy()))

    def trimmed(self) -> Tiles:
        """Return the fitted tiles without empty ones."""
        (tiles,) = self.fitted().living()
        return tiles

    def living(self, *of_tiles: Ints) -> tuple[Any, ...]:
        """Return the tiles that are not empty, and their entries of arrays of an entry a tile. The
        tiles must be fitted.
        """
        live = self.q0 < self.q1
        if live.all():
            return self, *of_tiles
        index = np.flatnonzero(live)
        return self[index], *(entries[index] for entries in of_tiles)

    @property
    def causal(self) -> NDArray[np.bool_]:
        """Bool [count]: the tiles that the diagonal from their top left corner alone cuts."""
        return (self.lo == -OPEN) & (self.hi == self.k0 - self.q0)

    def area(self) -> Ints:
        """Return the exact number of allowed (query, key) pairs of each tile, int64."""
        height, width = self.q1 - self.q0, self.k1 - self.k0
        # Pairs above the band (k - q > hi) and below it (k - q < lo) are triangles with a corner
        # cut off.
        above = _corner(height, width, self.k1 - 1 - self.q0 - self.hi)
        below = _corner(height, width, self.lo - (self.k0 - (self.q1 - 1)))
        return height * width - above - below

    def halves(self) -> list[tuple[Tiles, Ints]]:
        """Split the tiles at one query, or a causal tile at a key, into two parts with about half
        of the pairs each. So the parts of a causal tile are causal.

        Each part comes with the index of the tile that each of its tiles is part of. With many
        tokens, the cut is at a multiple of 128, because kernels work in blocks of 128.
        """
        by_key = self.causal.tolist() == [True]
        start, end = self.data[2 * by_key :][:2]
        low, high = start.min(initial=OPEN), end.max(initial=0)
        block = min(128, max((high - low) // 8, 1))
        edges = np.append(np.arange(low // block * block, high, block), high)
        parts, _, chunk = cut(self, edges, by_key)
        done = np.cumsum(np.bincount(chunk + 1, parts.area(), len(edges)))
        middle = edges[np.argmin(abs(2 * done - done[-1]))]
        parts, tile, half = cut(self, np.array([low, middle, high]), by_key)
        return [(parts[half == side], tile[half == side]) for side in (0, 1)]


def paint(tiles: Iterable[Tile], queries: int, keys: int) -> np.ndarray:
    """Count how many tiles allow each pair of a small score matrix: int64 `[queries, keys]`."""
    picture = np.zeros((queries, keys), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in tiles:
        offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        picture[q0:q1, k0:k1] += (offset >= lo) & (offset <= hi)
    return picture


def _corner(height: Ints, width: Ints, depth: Ints) -> Ints:
    """Count the cells of a height x width grid whose diagonal distance from one corner is below
    `depth`.
    """
    depth = np.clip(depth, 0, height + width - 1)

    def triangle(side: Ints) -> Ints:
        side = np.maximum(side, 0)
        return side * (side + 1) // 2

    return triangle(depth) - triangle(depth - height) - triangle(depth - width)


def _fit(data: Ints) -> Ints:
    """Fit tiles in place: see `Tiles.fitted`."""
    q0, q1, k0, k1, lo, hi = data
    empty = lo > hi
    np.maximum(q0, k0 - hi, out=q0)
    np.minimum(q1, k1 - lo, out=q1)
    np.maximum(k0, q0 + lo, out=k0)
    np.minimum(k1, q1 + hi, out=k1)
    lo[lo <= k0 - (q1 - 1)] = -OPEN
    hi[hi >= k1 - 1 - q0] = OPEN
    # A tile without keys, or with an empty band, gets no queries either, so that `q0 < q1` alone
    # tells a live tile.
    np.copyto(q1, q0, where=empty | (k0 >= k1))
    return data


def cut(tiles: Tiles, edges: Ints, keys: bool = False) -> tuple[Tiles, Ints, Ints]:
    """Cut the queries of tiles, or their keys, at chunk edges: (parts, the tile of each, the chunk
    of each).
    """
    start, end = tiles.data[2 * keys :][:2]
    tile, chunk = overlaps(start, end, edges[:-1], edges[1:])
    ends = edges[chunk], edges[chunk + 1]
    parts = tiles[tile].within(-OPEN, OPEN, *ends) if keys else tiles[tile].within(*ends)
    return parts.living(tile, chunk)


def split_at_edges(pieces: Tiles, edges: Ints, key_edges: Ints) -> tuple[Tiles, Ints, Ints]:
    """Cut the pieces of a mask at chunk edges, queries at `edges` and keys at `key_edges`: (tiles,
    query chunk of each, key chunk of each).
    """
    parts, _, chunk = cut(pieces, edges)
    tiles, part, key_chunk = cut(parts, key_edges, keys=True)
    return tiles, chunk[part], key_chunk


def coalesce(tiles: Tiles, group: Ints) -> tuple[Tiles, Ints]:
    """Join neighbors of the same group whose union is one tile, as the two chunks of a zigzag shard
    often are. The tiles must be fitted and disjoint.

    `group` numbers each tile's group; the result is sorted by (group, q0, k0).
    """
    for along_queries in (False, True, False):
        sides = (tiles.k0, tiles.q0) if along_queries else (tiles.q0, tiles.k0)
        sort = sort_index(group, *sides)
        tiles, group = tiles[sort], group[sort]
        while True:
            first, hulls = _unions(tiles, group, along_queries)
            if not len(first):
                break
            # Of a chain of neighbors the first two are joined, the next two, and so on.
            place = np.arange(len(first))
            chain = first - place
            even = (place - np.searchsorted(chain, chain)) % 2 == 0
            data = tiles.data.copy()
            data[:, first[even]] = hulls.data[:, even]
            kept = np.delete(np.arange(len(tiles)), first[even] + 1)
            tiles, group = Tiles(data)[kept], group[kept]
    return tiles, group


def _unions(tiles: Tiles, group: Ints, along_queries: bool) -> tuple[Ints, Tiles]:
    """Return the indices of the tiles whose union with the next one is a tile, and these unions.
    The two are neighbors in queries or, with the same queries, in keys.
    """
    a, b = tiles.data[:, :-1], tiles.data[:, 1:]
    near = (a[1] == b[0]) if along_queries else (a[3] == b[2]) & (a[0] == b[0]) & (a[1] == b[1])
    if along_queries:  # without a lower bound, all see the same first key
        near &= (a[2] == b[2]) | (np.maximum(a[4], b[4]) > -OPEN)
    first = np.flatnonzero(near & (group[:-1] == group[1:]))
    if not len(first):
        return first, tiles[:0]
    parts = tiles.data.take([first, first + 1], 1)
    hull = np.where(np.array([[0, 1, 0, 1, 1, 0]]).T, parts.max(1), parts.min(1))
    # a part equals the hull that is cut to its queries, or to its keys
    cut, side = hull[:, None].repeat(2, 1), slice(0, 2) if along_queries else slice(2, 4)
    cut[side] = parts[side]
    whole = np.flatnonzero((_fit(cut) == parts).reshape(-1, len(first)).all(0))
    return first[whole], Tiles(hull.take(whole, 1))
