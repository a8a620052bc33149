"""Tables of pieces, of which masks are made: read from plain numbers, checked for overlaps, and
joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import expand, runs, sort_index, starts_of
from cp_ring.plan.strips import cuts_of, intervals
from cp_ring.plan.tiles import OPEN, Tiles, coalesce


class Overlap(NamedTuple):
    """Two pieces that both have the pair (query, key)."""

    one: int
    other: int
    query: int
    key: int


def first_overlap(n: int, pieces: Tiles) -> Overlap | None:
    """The first overlap of two fitted pieces, None if all are disjoint. Interval arithmetic: see
    `cp_ring.plan.strips`.
    """
    cuts = cuts_of(n, pieces)
    keys = intervals(pieces, cuts)
    at = keys.overlap()
    if at is None:
        return None
    strip, pair = keys.strip[at], keys.tile[[at - 1, at]]
    query = np.arange(cuts[strip], cuts[strip + 1])
    _, _, k0, k1, lo, hi = pieces.data[:, pair, None]
    first, end = np.maximum(k0, query + lo).max(0), np.minimum(k1, query + hi + 1).min(0)
    shared = int((first < end).argmax())
    return Overlap(int(pair[0]), int(pair[1]), int(query[shared]), int(first[shared]))


def joined(n: int, pieces: Tiles) -> Tiles:
    """Disjoint pieces that allow what at least one of the fitted `pieces` allows.

    Strips are cut further where two sides cross, so that within a strip the order of all sides is
    the same at every query. Then the union of a strip's intervals at its first and at its last
    query is that of all its queries.
    """
    cuts = cuts_of(n, pieces)
    keys = intervals(pieces, cuts)
    size = np.bincount(keys.strip, minlength=len(cuts))
    one, other = expand(starts_of(size)[keys.strip], size[keys.strip])
    crossings = [cuts]
    for mine, its in product((0, 1), repeat=2):
        slope, level = keys.sides[mine::2, one], keys.sides[its::2, other]
        cross = (slope[0] < level[0]) & (slope[1] > level[1])
        crossings.append((cuts[keys.strip[one]] + level[0] - slope[0])[cross])
    cuts = np.unique(np.concatenate(crossings))
    keys = intervals(pieces, cuts)
    sort = sort_index(keys.strip, keys.sides[0], keys.sides[2])
    strip, (left0, right0, left1, right1) = keys.strip[sort], keys.sides[:, sort]
    base = strip * (n + 1)
    reach0, reach1 = (np.maximum.accumulate(base + right) for right in (right0, right1))
    apart = ((base + left0)[1:] > reach0[:-1]) | ((base + left1)[1:] > reach1[:-1])
    first, last = runs(apart, len(strip))
    strip, left0, left1 = strip[first], left0[first], left1[first]
    right0, right1 = reach0[last] - base[first], reach1[last] - base[first]
    q0, q1 = cuts[strip], cuts[strip + 1]
    lo = np.where(left1 > left0, left0 - q0, -OPEN)
    hi = np.where(right1 > right0, right0 - 1 - q0, OPEN)
    tiles = Tiles.columns(q0, q1, left0, right1, lo, hi).trimmed()
    return coalesce(tiles, np.zeros(len(tiles), np.int64))[0]


def read(pieces: Iterable[Sequence[int]]) -> Tiles:
    """Pieces of 4 or 6 numbers as tiles; a bound of a band beyond `OPEN` becomes open. Raises
    `PlanError` for others.
    """
    whole: list[tuple[int, ...]] = []
    for i, piece in enumerate(_iterated(pieces, "pieces")):
        values = _iterated(piece, f"piece {i}")
        if len(values) not in (4, 6):
            raise PlanError(
                f"piece {i} has {len(values)} numbers: it must be (q0, q1, k0, k1) or (q0, q1, k0, "
                "k1, lo, hi)"
            )
        whole.append((*values, -OPEN, OPEN)[:6])
    return Tiles.of(whole)


def _iterated[T](values: Iterable[T], what: str) -> tuple[T, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise PlanError(f"{what} is {values!r}, not a list") from None


def numbers(tiles: Tiles, i: int) -> tuple[int, ...]:
    """A piece as a person writes it."""
    values = tuple(tiles.data[:, i].tolist())
    return values[:4] if values[4:] == (-OPEN, OPEN) else values
