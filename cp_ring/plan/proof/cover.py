"""The proof that the tiles of a plan cover its mask, a part of `cp_ring.plan.proof.verify`."""

from __future__ import annotations

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, check_all, overlaps, starts_of
from cp_ring.plan.tables import PlanTables
from cp_ring.plan.tiles import Intervals, Tiles, cuts_of, intervals


def check_cover(plan: PlanTables) -> None:
    """Every allowed (query, key) pair is computed exactly once, and no other pair is.

    1. `tiles_in_stream` renames queries and keys of all tiles to positions of the stream.
    2. The query axis is cut into strips: at the edges of all tiles and pieces, and where one of
       their sides starts or stops to slope. Within a strip the first and last key of a tile are
       linear in the query (constant or slope 1).
    3. In each strip the tiles are sorted by their first key. No two of them may overlap at the
       first or at the last query of the strip, and neighbors that touch at both are joined. The
       same is done with the pieces of the mask. Then the joined intervals of the tiles must be
       those of the pieces: as many, and with the same ends at both queries.
    4. Two linear functions that agree at both ends of a strip agree in all of it, so the same holds
       for all its queries.

    A query may see any number of intervals of keys. Two tiles of a strip that overlap, or that are
    out of order at one end, break step 3 at that end (see `cp_ring.plan.tiles`). So do two pieces,
    whose mask then has a pair twice.

    Cost: sorting of the pairs (tile, strip) and one byte for each token, which marks the cuts.
    """
    tiles, parent = tiles_in_stream(plan)
    pieces = plan.mask.pieces
    inside = (pieces.data[[0, 2]] >= 0) & (pieces.data[[1, 3]] <= plan.n)
    check_all(
        inside.all(0),
        lambda i: (
            f"the mask is for {plan.n} tokens, but its piece {_numbers(plan.mask.pieces, i)} lies "
            "outside of them"
        ),
    )
    pieces = pieces.trimmed()
    cuts = cuts_of(plan.n, tiles, pieces)
    computed, allowed = intervals(tiles, cuts), intervals(pieces, cuts)

    def where(i: int) -> str:
        return place_of(plan, parent[computed.tile[i]])

    def queries(of: Intervals, i: int) -> str:
        return f"queries {cuts[of.strip[i]]}..{cuts[of.strip[i] + 1]}"

    twice = computed.overlap()
    if twice is not None:
        raise PlanError(
            f"{where(twice)}: {queries(computed, twice)} see a key that another tile computes for "
            "them too"
        )
    doubled = allowed.overlap()
    if doubled is not None:
        one, other = (_numbers(pieces, i) for i in allowed.tile[[doubled - 1, doubled]])
        raise PlanError(f"the mask has pairs twice: its pieces {one} and {other} overlap")
    computed, allowed = computed.joined(), allowed.joined()
    count = min(len(computed.strip), len(allowed.strip))
    differs = (computed.strip[:count] != allowed.strip[:count]) | (
        computed.sides[:, :count] != allowed.sides[:, :count]
    ).any(0)
    i = int(np.append(differs, True).argmax())
    missing = i < len(allowed.strip) and (
        i == len(computed.strip) or allowed.strip[i] < computed.strip[i]
    )
    if missing:
        start, end = cuts[allowed.strip[i]], cuts[allowed.strip[i] + 1]
        raise PlanError(_uncovered(plan, start, end, *allowed.sides[:2, i]))
    if i < len(computed.strip):
        known = i < len(allowed.strip) and allowed.strip[i] == computed.strip[i]
        wanted = f"{allowed.sides[0, i]}..{allowed.sides[1, i]}" if known else "no more"
        raise PlanError(
            f"{where(i)}: {queries(computed, i)} see keys "
            f"{computed.sides[0, i]}..{computed.sides[1, i]} at the first of them, but the mask "
            f"allows {wanted}"
        )


def tiles_in_stream(plan: PlanTables) -> tuple[Tiles, Ints]:
    """The plan's tiles in positions of the stream, split where chunks of a shard meet, and the
    index of the tile of each.
    """
    start, end, slide, shard = _shards(plan.layout)
    # All shards lie end to end on one axis, so that one search finds the tiles of all ranks.
    tiles = plan.tiles.shifted(shard[plan.tile_rank], shard[plan.tile_source])
    parent, cell = overlaps(tiles.q0, tiles.q1, start, end)
    part, key_cell = overlaps(tiles.k0[parent], tiles.k1[parent], start, end)
    parent, cell = parent[part], cell[part]
    split = (
        tiles[parent]
        .within(start[cell], end[cell], start[key_cell], end[key_cell])
        .shifted(slide[cell], slide[key_cell])
    )
    live = split.live()
    return split[live], parent[live]


def _shards(layout: Layout) -> tuple[Ints, Ints, Ints, Ints]:
    """All shards end to end: start and end of each chunk there, what to add for its tokens in the
    stream, and the start of each shard.
    """
    chunk = np.argsort(layout.owner, kind="stable")
    size = np.diff(layout.edges)[chunk]
    start = starts_of(size)
    return start, np.cumsum(size), layout.edges[chunk] - start, starts_of(layout.tokens_per_rank)


def place_of(plan: PlanTables, tile: int) -> str:
    q0, q1, k0, k1 = plan.tiles.data[:4, tile]
    return (
        f"rank {plan.tile_rank[tile]}, hop {plan.tile_hop[tile]}: tile of queries {q0}..{q1}, keys "
        f"{k0}..{k1} of rank {plan.tile_source[tile]}"
    )


def _numbers(pieces: Tiles, i: int) -> tuple[int, ...]:
    return tuple(pieces.data[:, i].tolist())


def _uncovered(plan: PlanTables, q0: int, q1: int, k0: int, k1: int) -> str:
    rank, source = (
        plan.layout.owner[np.searchsorted(plan.layout.edges, token, "right") - 1]
        for token in (q0, k0)
    )
    return (
        f"rank {rank}: queries {q0}..{q1} see keys {k0}..{k1}, the first of them of rank {source}, "
        "but no hop computes them"
    )
