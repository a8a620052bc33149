"""The union of masks, whose pieces may overlap, as disjoint pieces."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cp_ring.plan.proof import overlapping
from cp_ring.plan.ranges import Ints, expand, runs, sort_index, starts_of
from cp_ring.plan.tiles import OPEN, Tiles, coalesce


class Intervals(NamedTuple):
    """Intervals of keys in strips of queries, sorted by strip and first key.

    strip: int64 [count], the strip of each interval.
    tile: int64 [count], the tile that the interval is part of.
    sides: int64 [4, count], first key and end at the first query of the strip, and the same at its
    last query.
    """

    strip: Ints
    tile: Ints
    sides: Ints


def cuts_of(tiles: Tiles) -> Ints:
    """Return the queries at which a tile begins or ends, or one of its sides starts or stops to
    slope: int64, ascending. The tiles must be fitted (`Tiles.fitted`).
    """
    q0, q1, k0, k1, lo, hi = tiles.data
    slopes = (np.clip(turn, q0, q1) for turn in (k0 - lo, k1 - hi))
    return np.unique(np.concatenate([q0, q1, *slopes]))


def intervals(tiles: Tiles, cuts: Ints) -> Intervals:
    """Return the keys that each tile allows in each strip between two of `cuts`. The cost is an
    entry for each pair (tile, strip).
    """
    first = np.searchsorted(cuts, tiles.q0)
    tile, strip = expand(first, np.searchsorted(cuts, tiles.q1) - first)
    ends = [_keys(tiles, tile, query) for query in (cuts[strip], cuts[strip + 1] - 1)]
    sides = np.concatenate(ends)
    sort = sort_index(strip, sides[0])
    return Intervals(strip[sort], tile[sort], sides[:, sort])


def _keys(tiles: Tiles, which: Ints, query: Ints) -> Ints:
    """Return the first key that tile `which` allows a query, and the end of its keys: int64 [2,
    pairs].
    """
    k0, k1, lo, hi = tiles.data[2:, which]
    return np.stack([np.maximum(k0, query + lo), np.minimum(k1, query + hi + 1)])


def joined(pieces: Tiles) -> Tiles:
    """Return disjoint pieces that allow each pair that at least one of the fitted `pieces` allows.

    Pieces whose keys lie apart are joined apart, on queries that lie end to end: a strip of all
    queries would have an interval of each piece.
    """
    pieces = pieces[sort_index(pieces.k0)]
    apart = pieces.k0[1:] >= np.maximum.accumulate(pieces.k1)[:-1]
    first, _ = runs(apart, len(pieces))
    top = np.minimum.reduceat(pieces.q0, first)
    start = starts_of(np.maximum.reduceat(pieces.q1, first) - top)
    of_piece = np.cumsum(np.append(False, apart))
    own = pieces.shifted((start - top)[of_piece], 0)
    if overlapping(own.data) is None:
        return pieces
    own = _joined(own)
    tiles = own.shifted((top - start)[np.searchsorted(start, own.q0, "right") - 1], 0)
    return coalesce(tiles, np.zeros(len(tiles), np.int64))[0]


def _joined(pieces: Tiles) -> Tiles:
    """Return `joined` pieces that are not coalesced.

    Strips are cut further where two sides cross, so that within a strip the order of all sides is
    the same at every query. Then the union of a strip's intervals can be read off its first and its
    last query.
    """
    cuts, width = cuts_of(pieces), int(pieces.k1.max()) + 2
    keys = intervals(pieces, cuts)
    first, last = keys.sides.reshape(2, -1)
    # A side that slopes crosses the level ones between its ends; two that slope are parallel.
    base = np.tile(keys.strip * width, 2)
    level = np.unique((base + first)[first == last])
    slopes = np.flatnonzero(first < last)
    low = np.searchsorted(level, (base + first)[slopes], "right")
    high = np.searchsorted(level, (base + last)[slopes])
    slope, crossed = expand(low, np.maximum(high - low, 0))
    slope = slopes[slope]
    crossings = np.tile(cuts[keys.strip], 2)[slope] + level[crossed] - (base + first)[slope]
    cuts = np.unique(np.concatenate([cuts, crossings]))
    keys = intervals(pieces, cuts)
    sort = sort_index(keys.strip, keys.sides[0], keys.sides[2])
    strip, (left0, right0, left1, right1) = keys.strip[sort], keys.sides[:, sort]
    base = strip * width
    reach0, reach1 = (np.maximum.accumulate(base + right) for right in (right0, right1))
    apart = ((base + left0)[1:] > reach0[:-1]) | ((base + left1)[1:] > reach1[:-1])
    first, last = runs(apart, len(strip))
    strip, left0, left1 = strip[first], left0[first], left1[first]
    right0, right1 = reach0[last] - base[first], reach1[last] - base[first]
    q0, q1 = cuts[strip], cuts[strip + 1]
    lo = np.where(left1 > left0, left0 - q0, -OPEN)
    hi = np.where(right1 > right0, right0 - 1 - q0, OPEN)
    return Tiles.columns(q0, q1, left0, right1, lo, hi).trimmed()
