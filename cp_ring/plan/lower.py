"""Lowering rewrites tiles into tiles that a kernel supports.

Every kernel supports FULL (an uncut rectangle) and CAUSAL (a square cut by its main diagonal).
These two are enough for any band: a band consists of lower triangles, upper triangles and
rectangles between them, and an upper triangle is causal after both its query order and its key
order are reversed. Native bands and varlen calls are faster, but not required.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, expand, sort_index
from cp_ring.plan.tiles import OPEN, Tiles

BLOCK = 128
"""The number of queries of a block of kernels. Strips of a sloping band have a multiple of this
many queries.
"""

FULL, CAUSAL, REVERSED, BAND = range(4)


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a kernel beyond FULL and CAUSAL squares.

        Capabilities(bands=True, varlen=True)  # a kernel like flash-attn

    bands: it supports any band on any rectangle in which every query sees a key, as flash-attn's
    bottom-right aligned windows.
    varlen: it takes many tiles of one kind in one call, as sequences of queries, each with keys of
    its own.
    deterministic: it computes the same bits in every run if the caller asks for that; tiles do not
    depend on this.
    slow: it exists for comparisons; `auto` takes it last.
    """

    bands: bool = False
    varlen: bool = False
    deterministic: bool = False
    slow: bool = False


ASSUMED = Capabilities(bands=True, varlen=True, deterministic=True)
"""The capabilities that predictions assume, those of flash-attn: it has native windows and takes
many tiles in one call.
"""


@dataclass(frozen=True, eq=False)
class Lowered:
    """Tiles for a kernel, in the coordinates of the tiles that they are parts of, sorted by
    `parent`.

    parent: int64 [count], the index of the tile that each one is part of.
    kind: int64 [count], FULL, CAUSAL, REVERSED or BAND.
    """

    tiles: Tiles
    parent: Ints
    kind: Ints

    @property
    def reverse(self) -> NDArray[np.bool_]:
        """bool [count]: True for tiles that are causal after query and key order are both reversed;
        `lo` is then the square's diagonal.
        """
        return self.kind == REVERSED

    @property
    def windows(self) -> Ints:
        """int64 [2, count]: bands as windows aligned bottom right, as flash-attn defines them, left
        and right; -1 for an open side.
        """
        tiles = self.tiles
        corner = tiles.k1 - tiles.q1
        left = np.where(tiles.lo == -OPEN, -1, corner - tiles.lo)
        return np.stack([left, np.where(tiles.hi == OPEN, -1, tiles.hi - corner)])


def lower(tiles: Tiles, capabilities: Capabilities) -> Lowered:
    """Rewrite `tiles` into disjoint tiles that allow the same pairs and that a kernel of these
    capabilities supports.

        tiles = lower(Tiles.of([Tile(0, 512, 0, 512, lo=-200, hi=0)]), Capabilities()).tiles
    """
    tiles, parent = tiles.fitted().living(np.arange(len(tiles)))
    if not capabilities.bands:
        tiles, parent = _flatten(tiles, parent)
    square = tiles.q1 - tiles.q0 == tiles.k1 - tiles.k0
    upper = (tiles.hi == OPEN) & (tiles.lo == tiles.k0 - tiles.q0)
    kinds = [~tiles.banded, square & tiles.causal, square & upper]
    kind = np.select(kinds, [FULL, CAUSAL, REVERSED], BAND)
    return Lowered(tiles, parent, kind)


def _flatten(tiles: Tiles, parent: Ints) -> tuple[Tiles, Ints]:
    """Rewrite bands as FULL, CAUSAL and REVERSED tiles."""
    strips, parent = _cut_at_slopes(tiles, parent)
    q0, q1, k0, k1, lo, hi = strips.data
    left, right = k0 < q1 - 1 + lo, q0 + hi < k1 - 1
    flat, sloped = np.flatnonzero(~(left | right)), np.flatnonzero(left | right)
    q0, q1, k0, k1, lo, hi = strips.data[:, sloped]
    left, right = left[sloped], right[sloped]
    # The rectangle between the triangles: the keys that the strip's first and last query both see,
    # less the diagonals.
    inner0, inner1 = np.where(left, q1 + lo, k0), np.where(right, q0 + hi, k1)
    # Triangles of one query more than the band is wide would share a key: it is the lower one's.
    end = q1 - (right & (q1 - q0 > hi - lo))
    above = Tiles.columns(q0, end, q0 + lo, end + lo, lo=lo)
    middle = Tiles.columns(q0, q1, inner0, inner1)
    below = Tiles.columns(q0, q1, q0 + hi, q1 + hi, hi=hi)
    full, down = inner0 < inner1, right & (lo != hi)
    parts = Tiles.concatenate(strips[flat], above[left], middle[full], below[down])
    origin = parent[np.concatenate([flat, sloped[left], sloped[full], sloped[down]])]
    sort = sort_index(origin, parts.q0, parts.k0)
    return parts[sort].fitted(), origin[sort]


def _cut_at_slopes(tiles: Tiles, parent: Ints) -> tuple[Tiles, Ints]:
    """Cut tiles into strips of queries in which each side of the band slopes either everywhere or
    nowhere.

    Strips in which both sides slope are cut further, to at most as many queries as the band has
    diagonals, so that their triangles meet in one key at most.
    """
    q0, q1, k0, k1, lo, hi = tiles.data
    # The left side slopes from query `slopes` on, the right side slopes before query `levels`.
    slopes, levels = np.clip(k0 - lo, q0, q1), np.clip(k1 - hi, q0, q1)
    # The first query of the left slope sees all keys yet: it may fill the strip before it up.
    slopes += (slopes < levels) & ((slopes + 1 - q0) % BLOCK == 0)
    cuts = np.stack([q0, np.minimum(slopes, levels), np.maximum(slopes, levels), q1])
    both = slopes < levels
    width, blocks = hi - lo, (hi - lo + 1) // BLOCK * BLOCK
    height = np.where(blocks > 0, blocks, np.maximum(width, 1))
    size = np.maximum(np.diff(cuts, axis=0), 1)
    size[1, both] = height[both]
    start, end, size = (x.reshape(-1) for x in (cuts[:-1], cuts[1:], size))
    which, number = expand(np.zeros_like(start), -(-(end - start) // size))
    first = start[which] + number * size[which]
    last = np.minimum(first + size[which], end[which])
    which %= len(tiles)
    return tiles[which].within(first, last), parent[which]


def call_groups(lowered: Lowered, varlen: bool) -> list[list[list[int]]]:
    """Group tiles into kernel calls: a list of calls, each a list of sequences, each a list of tile
    indices.

    A sequence is one tile, or FULL tiles with the same queries, whose keys are laid end to end in
    the call. Without `varlen` each call is one tile. The sequences of a call have one kind and
    window, share neither queries nor keys, and are in the order of their queries. So each token of
    dk and dv gets one addition, and the sum does not depend on the order.
    """
    tiles = lowered.tiles
    if not varlen:
        return [[[index]] for index in range(len(tiles))]
    one_window = np.stack([lowered.kind, *lowered.windows])
    one_window[1:, lowered.reverse] = 0
    kinds, spans = list(map(tuple, one_window.T.tolist())), tiles.data.T.tolist()

    def alike(index: int) -> tuple[int, ...]:
        return *kinds[index], *spans[index][:2], index * (kinds[index][0] != FULL)

    calls: dict[tuple[int, ...], list[_Call]] = {}
    order = np.lexsort((tiles.k0, tiles.q1, tiles.q0, *one_window)).tolist()
    for (*kind, q0, q1, _), group in groupby(order, alike):
        sequence, of_kind = list(group), calls.setdefault(tuple(kind), [])
        bits = sum((1 << spans[index][3]) - (1 << spans[index][2]) for index in sequence)
        call = next((call for call in of_kind if q0 >= call.end and not bits & call.keys), None)
        if call is None:
            of_kind.append(call := _Call())
        call.sequences.append(sequence)
        call.end, call.keys = q1, call.keys | bits
    return [call.sequences for of_kind in calls.values() for call in of_kind]


@dataclass
class _Call:
    """A call that is being filled: its sequences, the end of their queries, and a bit for each of
    their keys.
    """

    sequences: list[list[int]] = field(default_factory=list)
    end: int = 0
    keys: int = 0
