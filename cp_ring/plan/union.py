"""The union of masks, whose pieces may overlap, as disjoint pieces."""

from __future__ import annotations

import numpy as np

from cp_ring.plan.proof import overlapping
from cp_ring.plan.ranges import Ints, expand, runs, sort_index, starts_of
from cp_ring.plan.tiles import OPEN, Tiles, coalesce


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

    Strips of queries are cut where a piece begins or ends, where one of its sides starts or stops
    to slope, and where two sides cross, so that within a strip the order of all sides is the same
    at every query. Then the union of a strip's intervals of keys can be read off its first and its
    last query.
    """
    q0, q1, k0, k1, lo, hi = pieces.data
    turns = [np.clip(turn, q0, q1) for turn in (k0 - lo, k1 - hi)]
    cuts, width = np.unique(np.concatenate([q0, q1, *turns])), int(k1.max()) + 2
    strip, sides = _intervals(pieces, cuts)
    # A side that slopes crosses the level ones between its ends; two that slope are parallel.
    strip = np.tile(strip, 2)
    first, last = strip * width + sides.reshape(2, -1)
    level, slopes = np.unique(first[first == last]), np.flatnonzero(first < last)
    low = np.searchsorted(level, first[slopes], "right")
    slope, crossed = expand(low, np.maximum(np.searchsorted(level, last[slopes]) - low, 0))
    slope = slopes[slope]
    cuts = np.union1d(cuts, cuts[strip[slope]] + level[crossed] - first[slope])
    strip, sides = _intervals(pieces, cuts)
    sort = sort_index(strip, sides[0], sides[2])
    strip, (left0, right0, left1, right1) = strip[sort], sides[:, sort]
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


def _intervals(tiles: Tiles, cuts: Ints) -> tuple[Ints, Ints]:
    """Return the keys that each tile allows in each strip between two of `cuts`, an entry for each
    pair: the strip, and int64 [4, pairs], first key and end at the first query of the strip, and
    the same at its last query.
    """
    first = np.searchsorted(cuts, tiles.q0)
    tile, strip = expand(first, np.searchsorted(cuts, tiles.q1) - first)
    k0, k1, lo, hi = tiles.data[2:, tile]
    ends: list[Ints] = []
    for query in (cuts[strip], cuts[strip + 1] - 1):
        ends += [np.maximum(k0, query + lo), np.minimum(k1, query + hi + 1)]
    return strip, np.stack(ends)
