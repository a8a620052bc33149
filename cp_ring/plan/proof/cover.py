"""The proof that the tiles of a plan cover its mask; part of `cp_ring.plan.proof.verify`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, check_all, expand, overlaps, runs, sort_index, starts_of
from cp_ring.plan.tables import PlanTables
from cp_ring.plan.tiles import OPEN, Intervals, Tiles, cuts_of, intervals


def check_cover(plan: PlanTables) -> None:
    """Prove that every allowed (query, key) pair is computed exactly once, and no other pair is.

    1. All shards lie end to end on one axis of queries. Keys are tokens of their owner's shard. A
       shard holds its chunks in ascending order, so a range of keys of the stream is one range of
       each shard (`_Shards.tokens_before`).
    2. The axis is cut into strips: at the edges of all tiles and pieces; where a side of a tile or
       a piece starts or stops to slope; and where a sloping side of a piece meets the edge of a
       chunk of queries or of keys. So within a strip the first and the last key of a tile, and
       those of a piece in each shard, are linear in the query (constant or slope 1), and a piece
       sees keys of a shard at all queries or at none.
    3. In each strip and for each owner the tiles are sorted by their first key. No two of them may
       overlap at the first or at the last query of the strip, and neighbors that touch at both are
       joined. The same is done with the pieces of the mask. Then the joined intervals of the tiles
       must equal those of the pieces: as many, and with the same ends at both queries.
    4. Two linear functions that agree at both ends of a strip agree in all of it, so the same holds
       for all its queries.

    A query may see any number of intervals of keys. Two tiles of a strip that overlap, or that are
    out of order at one end, break step 3 at that end (see `cp_ring.plan.tiles`). So do two pieces,
    whose mask then has a pair twice.

    Cost: sorting of the pairs (tile, strip), of the triples (piece, strip, owner), and one byte for
    each token, which marks the cuts.
    """
    _check_inside(plan)
    pieces = plan.mask.pieces.trimmed()
    shards = _Shards(plan.layout)
    tiles = plan.tiles.shifted(shards.first[plan.tile_rank], 0)
    parts, piece, slide = _parts(pieces, shards)
    cuts = np.union1d(cuts_of(plan.n, tiles), _cuts_of_parts(parts, slide, plan.layout.edges))
    computed = intervals(tiles, cuts)
    computed = _by_owner(computed, plan.tile_source[computed.tile], plan.cp)
    allowed = _allowed(parts, piece, slide, cuts, shards)
    names = _Names(plan, shards, cuts)
    _check_disjoint(computed, allowed, pieces, names)
    _check_equal(computed.joined(), allowed.joined(), names)


def _check_inside(plan: PlanTables) -> None:
    """Prove that the pieces of the mask lie inside the stream."""
    pieces = plan.mask.pieces
    inside = (pieces.data[[0, 2]] >= 0) & (pieces.data[[1, 3]] <= plan.n)
    check_all(
        inside.all(0),
        lambda i: (
            f"the mask is for {plan.n} tokens, but its piece {_numbers(pieces, i)} lies outside of "
            "them"
        ),
    )


def _check_disjoint(computed: Intervals, allowed: Intervals, pieces: Tiles, names: _Names) -> None:
    """Check that in no strip two tiles, or two pieces, have a pair in common."""
    twice = computed.overlap()
    if twice is not None:
        raise PlanError(
            f"{names.tile(computed, twice)}: {names.queries(computed, twice)} see a key that "
            "another tile computes for them too"
        )
    doubled = allowed.overlap()
    if doubled is not None:
        one, other = (_numbers(pieces, i) for i in allowed.tile[[doubled - 1, doubled]])
        raise PlanError(f"the mask has pairs twice: its pieces {one} and {other} overlap")


def _check_equal(computed: Intervals, allowed: Intervals, names: _Names) -> None:
    """Check that the joined intervals of the tiles are those of the mask."""
    count = min(len(computed.strip), len(allowed.strip))
    differs = (computed.strip[:count] != allowed.strip[:count]) | (
        computed.sides[:, :count] != allowed.sides[:, :count]
    ).any(0)
    i = int(np.append(differs, True).argmax())
    missing = i < len(allowed.strip) and (
        i == len(computed.strip) or allowed.strip[i] < computed.strip[i]
    )
    if missing:
        raise PlanError(
            f"rank {names.rank(allowed, i)}: {names.queries(allowed, i)} see keys "
            f"{names.keys(allowed, i)} of rank {names.owner(allowed, i)} (those of the first "
            "query), but no hop computes them"
        )
    if i < len(computed.strip):
        known = i < len(allowed.strip) and allowed.strip[i] == computed.strip[i]
        wanted = names.keys(allowed, i) if known else "no more"
        raise PlanError(
            f"{names.tile(computed, i)}: {names.queries(computed, i)} see keys "
            f"{names.keys(computed, i)} (those of the first query), but the mask allows {wanted}"
        )


@dataclass(frozen=True)
class _Names:
    """Names the rank, the hop and the tokens of an interval in error lines."""

    plan: PlanTables
    shards: _Shards
    cuts: Ints

    def _strip(self, of: Intervals, i: int) -> int:
        return int(of.strip[i] // self.plan.cp)

    def owner(self, of: Intervals, i: int) -> int:
        """The rank that holds the keys."""
        return int(of.strip[i] % self.plan.cp)

    def rank(self, of: Intervals, i: int) -> int:
        """The rank that holds the queries."""
        first = self.cuts[self._strip(of, i)]
        return int(np.searchsorted(self.shards.first, first, "right")) - 1

    def tile(self, of: Intervals, i: int) -> str:
        return place_of(self.plan, of.tile[i])

    def queries(self, of: Intervals, i: int) -> str:
        strip = self._strip(of, i)
        start, end = self.shards.in_stream(self.cuts[strip], self.cuts[strip + 1])
        return f"queries {start}..{end}"

    def keys(self, of: Intervals, i: int) -> str:
        first = self.shards.first[self.owner(of, i)]
        start, end = self.shards.in_stream(*(first + of.sides[:2, i]))
        return f"{start}..{end}"


class _Shards:
    """The shards of a layout, end to end on one axis.

    first: where each shard begins.
    starts: where the chunks of all shards begin, in the order of the axis, and the end of the axis.
    at: where each chunk of the stream begins.
    """

    def __init__(self, layout: Layout):
        self.layout, self.cp, self.edges = layout, layout.cp, layout.edges
        self._order = np.argsort(layout.owner, kind="stable")
        size = np.diff(layout.edges)[self._order]
        self.starts = np.append(starts_of(size), layout.n)
        self.at = np.empty(len(size), np.int64)
        self.at[self._order] = self.starts[:-1]
        self.first = starts_of(layout.tokens_per_rank)
        self._numbers = self._number(layout.owner[self._order], self._order)

    def _number(self, owner: Ints, chunk: Ints) -> Ints:
        return owner * len(self.edges) + chunk

    def chunk(self, token: Ints) -> Ints:
        """Return the chunk that holds a token of the stream."""
        return np.searchsorted(self.edges, token, "right") - 1

    def tokens_before(self, owner: Ints, token: Ints, chunk: Ints) -> Ints:
        """Count the tokens of an owner that lie before a token of the stream. The token is in
        `chunk`, or at its end.

        These are the owner's chunks before it and, if it owns the chunk, a part of that.
        """
        place = np.searchsorted(self._numbers, self._number(owner, chunk))
        whole = self.starts[place] - self.first[owner]
        return whole + (self.layout.owner[chunk] == owner) * (token - self.edges[chunk])

    def in_stream(self, start: int, end: int) -> tuple[int, int]:
        """Return the leading tokens of a range of the axis that follow one another in the
        stream.
        """
        place = int(np.searchsorted(self.starts, start, "right")) - 1
        slide = int(self.edges[self._order[place]] - self.starts[place])
        return int(start) + slide, min(int(end), int(self.starts[place + 1])) + slide


def _parts(pieces: Tiles, shards: _Shards) -> tuple[Tiles, Ints, Ints]:
    """Return the fitted pieces cut by the chunks of their queries, as parts in positions of the
    stream; the piece of each part; and the number that turns the queries of each part into places
    on the axis of all shards.

    Parts without a band that follow one another in a shard and see the same keys are joined; their
    queries are places on the axis already.
    """
    piece, chunk = overlaps(pieces.q0, pieces.q1, shards.edges[:-1], shards.edges[1:])
    parts = pieces[piece].within(shards.edges[chunk], shards.edges[chunk + 1])
    live = parts.live()
    parts, piece, chunk = parts[live], piece[live], chunk[live]
    slide = (shards.at - shards.edges[:-1])[chunk]
    flat = (parts.lo == -OPEN) & (parts.hi == OPEN)
    parts.data[:2, flat] += slide[flat]
    slide[flat] = 0
    sort = sort_index(piece, parts.q0 + slide)
    parts, piece, slide, flat = parts[sort], piece[sort], slide[sort], flat[sort]
    _, q1, k0, k1, _, _ = parts.data[:, :-1]
    goes_on = flat[:-1] & flat[1:] & (piece[:-1] == piece[1:]) & (q1 == parts.q0[1:])
    goes_on &= (k0 == parts.k0[1:]) & (k1 == parts.k1[1:])
    first, last = runs(~goes_on, len(parts))
    ends = parts.q1[last]
    parts = parts[first]
    parts.data[1] = ends
    return parts, piece[first], slide[first]


def _cuts_of_parts(parts: Tiles, slide: Ints, edges: Ints) -> Ints:
    """Return where parts begin and end on the axis, and where one of their sides starts or stops to
    slope or meets the edge of a chunk of keys.
    """
    cuts = [parts.q0 + slide, parts.q1 + slide]
    for bound in (parts.lo, parts.hi):
        which = np.flatnonzero(np.abs(bound) != OPEN)
        q0, q1, slope = parts.q0[which], parts.q1[which], bound[which]
        first = np.searchsorted(edges, q0 + slope)
        part, edge = expand(first, np.searchsorted(edges, q1 + slope) - first)
        cuts.append(edges[edge] - slope[part] + slide[which[part]])
    turns = (parts.k0 - parts.lo, parts.k1 - parts.hi)
    cuts += [np.clip(turn, parts.q0, parts.q1) + slide for turn in turns]
    return np.concatenate(cuts)


def _allowed(parts: Tiles, piece: Ints, slide: Ints, cuts: Ints, shards: _Shards) -> Intervals:
    """Return the keys of each owner that each part of the mask allows in each strip; `tile` is the
    piece.

    The first and the last key lie in the same two chunks at all queries of a strip.
    """
    first = np.searchsorted(cuts, parts.q0 + slide)
    part, strip = expand(first, np.searchsorted(cuts, parts.q1 + slide) - first)
    _, _, k0, k1, lo, hi = parts.data[:, part]
    ends = [cuts[strip] - slide[part], cuts[strip + 1] - 1 - slide[part]]
    left = [np.maximum(k0, query + lo) for query in ends]
    right = [np.minimum(k1, query + hi + 1) for query in ends]
    low, high = shards.chunk(left[0]), shards.chunk(right[0] - 1)
    which, owner = _owners(low, high, shards)
    sides = []
    for start, end in zip(left, right, strict=True):
        sides.append(shards.tokens_before(owner, start[which], low[which]))
        sides.append(shards.tokens_before(owner, end[which], high[which]))
    seen = (sides[0] < sides[1]) | (sides[2] < sides[3])
    which, owner = which[seen], owner[seen]
    found = Intervals(strip[which], piece[part[which]], np.stack(sides)[:, seen])
    return _by_owner(found, owner, shards.cp)


def _owners(low: Ints, high: Ints, shards: _Shards) -> tuple[Ints, Ints]:
    """Return pairs (i, owner): the owners of chunks `low[i]` to `high[i]`, once each; all ranks if
    these are more chunks than ranks.
    """
    count = high - low + 1
    wide = count > shards.cp
    i, number = expand(np.where(wide, 0, low), np.where(wide, shards.cp, count))
    owner = shards.layout.owner[np.minimum(number, len(shards.layout.owner) - 1)]
    owner = np.where(wide[i], number, owner)
    sort = sort_index(i, owner)
    i, owner = i[sort], owner[sort]
    new = np.append(True, (i[1:] != i[:-1]) | (owner[1:] != owner[:-1]))[: len(i)]
    return i[new], owner[new]


def _by_owner(of: Intervals, owner: Ints, cp: int) -> Intervals:
    """Return the intervals in the order of strip and owner, with a number for each such pair in
    place of the strip.
    """
    strip = of.strip * cp + owner
    sort = sort_index(strip, of.sides[0])
    return Intervals(strip[sort], of.tile[sort], of.sides[:, sort])


def place_of(plan: PlanTables, tile: int) -> str:
    q0, q1, k0, k1 = plan.tiles.data[:4, tile]
    return (
        f"rank {plan.tile_rank[tile]}, hop {plan.tile_hop[tile]}: tile of queries {q0}..{q1}, keys "
        f"{k0}..{k1} of rank {plan.tile_source[tile]}"
    )


def _numbers(pieces: Tiles, i: int) -> tuple[int, ...]:
    return tuple(pieces.data[:, i].tolist())
