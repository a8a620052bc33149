"""Strips of queries: what tiles allow, cut where it is linear, so that sets of keys are compared by
their ends alone.

The query axis is cut at the edges of all tiles, and where one of their sides starts or stops to
slope. Within a strip the first and the last key of a tile are linear in the query, with slope 0 or
1. So two sides that agree at the first and at the last query of a strip agree at all of its
queries.

The planner makes no use of this module. The algebra of masks and the proof of exact cover do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.plan.ranges import Ints, expand, runs, sort_index
from cp_ring.plan.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Intervals:
    """Intervals of keys of strips, sorted by strip and first key.

    strip: int64 [count], the strip of each.
    tile: int64 [count], the tile that each is of; of joined ones the first.
    sides: int64 [4, count], first key and end at the first query of the strip, and the same at its
    last query.
    """

    strip: Ints
    tile: Ints
    sides: Ints

    def __getitem__(self, index: Ints) -> Intervals:
        return Intervals(self.strip[index], self.tile[index], self.sides[:, index])

    def overlap(self) -> int | None:
        """Index of the first interval that shares a key with the one before it, at some query of
        their strip.

        It is enough to compare neighbors at both ends. Sides are linear and move by at most one key
        from a query to the next, so that two intervals cannot change places without sharing a key.
        Then they are in the wrong order at the last query.
        """
        same = self.strip[1:] == self.strip[:-1]
        bad = np.flatnonzero(same & (self.sides[1::2, :-1] > self.sides[0::2, 1:]).any(0))
        return int(bad[0]) + 1 if len(bad) else None

    def joined(self) -> Intervals:
        """Neighbors that touch at all queries of their strip as one interval. No two may overlap."""
        touch = (self.strip[1:] == self.strip[:-1]) & (
            self.sides[1::2, :-1] == self.sides[0::2, 1:]
        ).all(0)
        first, last = runs(~touch, len(self.strip))
        sides = self.sides[:, first]
        sides[1::2] = self.sides[1::2, last]
        return Intervals(self.strip[first], self.tile[first], sides)


def cuts_of(n: int, *tables: Tiles) -> Ints:
    """Queries at which a tile begins, ends, or has a side that starts or stops to slope: int64,
    ascending, within 0 to `n`.

    The tiles must be fitted (`Tiles.fitted`) and lie within `n` queries. Costs a byte for each
    query.
    """
    marks = np.zeros(n + 1, bool)
    for tiles in tables:
        slopes = (
            np.clip(turn, tiles.q0, tiles.q1) for turn in (tiles.k0 - tiles.lo, tiles.k1 - tiles.hi)
        )
        for query in (tiles.q0, tiles.q1, *slopes):
            marks[query] = True
    return np.flatnonzero(marks)


def intervals(tiles: Tiles, cuts: Ints) -> Intervals:
    """The keys that each tile allows in each strip between two of `cuts`. Costs an entry for each
    pair (tile, strip).
    """
    first = np.searchsorted(cuts, tiles.q0)
    tile, strip = expand(first, np.searchsorted(cuts, tiles.q1) - first)
    ends = [_keys(tiles, tile, query) for query in (cuts[strip], cuts[strip + 1] - 1)]
    sides = np.concatenate(ends)
    sort = sort_index(strip, sides[0])
    return Intervals(strip[sort], tile[sort], sides[:, sort])


def _keys(tiles: Tiles, which: Ints, query: Ints) -> Ints:
    """First key that tile `which` allows a query, and the end of its keys: int64 [2, pairs]."""
    k0, k1, lo, hi = tiles.data[2:, which]
    return np.stack([np.maximum(k0, query + lo), np.minimum(k1, query + hi + 1)])
