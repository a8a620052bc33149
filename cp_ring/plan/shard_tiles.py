"""Cuts the pieces of a mask into tiles of shards: queries of one rank, keys of one owner."""

from __future__ import annotations

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, overlaps, runs, sort_index
from cp_ring.plan.records import PlanTables
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import OPEN, Tiles, split_at_edges

Parts = tuple[Tiles, Ints, Ints, Ints]
"""Tiles with keys in their shard, the rank of each tile's queries, the owner of its keys, and the
number to add to its queries for their place in the shard.
"""


def shard_tiles(
    pieces: Tiles, layout: Layout, member: int | None = None
) -> tuple[Tiles, Ints, Ints]:
    """Return fitted tiles that allow the pairs of `pieces`, each of one rank and one owner, in
    positions of their shards: (tiles, rank of each, owner of each). With `member`, only the tiles
    whose rank or owner it is.

    A tile for each pair of chunks would give millions of tiles where a document has thousands of
    chunks. A shard holds its chunks in ascending order, so the keys of an owner within a range of
    the stream are one range of its shard. So are the queries that one piece alone has.
    """
    parts, rank, slide = _query_parts(pieces, layout)
    if member is None:
        found = [_key_parts(parts, rank, slide, layout)]
    else:
        mine, others = np.flatnonzero(rank == member), np.flatnonzero(rank != member)
        own = np.flatnonzero(layout.owner == member)
        found = [
            _key_parts(parts[mine], rank[mine], slide[mine], layout),
            _key_parts(parts[others], rank[others], slide[others], layout, own),
        ]
    tables, ranks, owners, slides = zip(*found, strict=True)
    tiles = Tiles.concatenate(*tables).shifted(np.concatenate(slides), 0)
    return tiles, np.concatenate(ranks), np.concatenate(owners)


def _query_parts(pieces: Tiles, layout: Layout) -> tuple[Tiles, Ints, Ints]:
    """Return pieces cut by the chunks of their queries, the rank of each part, and the number to
    add to its queries for their place in the shard.

    A piece without a band that shares no query with another one gives one part for each rank,
    already in the shard.
    """
    edges, owner = layout.edges, layout.owner
    piece, chunk = overlaps(pieces.q0, pieces.q1, edges[:-1], edges[1:])
    parts = pieces[piece].within(edges[chunk], edges[chunk + 1])
    live = parts.live()
    parts, piece, chunk = parts[live], piece[live], chunk[live]
    slide = (layout.starts - edges[:-1])[chunk]
    alone = _alone(pieces)[piece]
    if not alone.any():
        return parts, owner[chunk], slide
    whole, others = np.flatnonzero(alone), np.flatnonzero(~alone)
    whole = whole[sort_index(piece[whole], owner[chunk[whole]], chunk[whole])]
    group = piece[whole] * layout.cp + owner[chunk[whole]]
    first, last = (whole[ends] for ends in runs(group[1:] != group[:-1], len(whole)))
    merged = parts[first]
    merged.data[0] += slide[first]
    merged.data[1] = parts.q1[last] + slide[last]
    return (
        Tiles.concatenate(merged, parts[others]),
        owner[chunk[np.concatenate([first, others])]],
        np.concatenate([np.zeros_like(first), slide[others]]),
    )


def _alone(pieces: Tiles) -> np.ndarray:
    """Return bool [pieces]: True if a piece has no band and shares no query with another piece."""
    sort = np.argsort(pieces.q0, kind="stable")
    q0, q1 = pieces.q0[sort], pieces.q1[sort]
    free = np.ones(len(pieces), bool)
    free[1:] = np.maximum.accumulate(q1)[:-1] <= q0[1:]
    free[:-1] &= q1[:-1] <= q0[1:]
    alone = np.empty_like(free)
    alone[sort] = free
    return alone & (pieces.lo == -OPEN) & (pieces.hi == OPEN)


def _key_parts(
    parts: Tiles, rank: Ints, slide: Ints, layout: Layout, chunks: Ints | None = None
) -> Parts:
    """Return the parts cut by the chunks of their keys, or by these `chunks` alone.

    If all queries of a part see more chunks than there are owners, these chunks are one tile for
    each owner.
    """
    edges, count = layout.edges, len(parts)
    part, start, end = np.arange(count), parts.k0, parts.k1
    owners = np.zeros((4, 0), np.int64)
    if chunks is None:
        chunks = np.arange(len(layout.owner))
        first, last = _chunks_of_all(parts, edges)
        wide = np.flatnonzero(last - first > layout.cp)
        if len(wide):
            owners = _key_ranges(wide, first[wide], last[wide], layout)
            part = np.concatenate([part, wide])
            start, end = np.append(start, edges[last[wide]]), np.append(end, end[wide])
            end[wide] = edges[first[wide]]
    rest = parts[part].within(k0=start, k1=end)
    which, place = overlaps(rest.k0, rest.k1, edges[chunks], edges[chunks + 1])
    chunk = chunks[place]
    tiles = rest[which].within(k0=edges[chunk], k1=edges[chunk + 1])
    live = tiles.live()
    chunk, part = chunk[live], part[which[live]]
    tiles = tiles[live].shifted(0, (layout.starts - edges[:-1])[chunk])
    of, owner, k0, k1 = owners
    tiles = Tiles.concatenate(tiles, Tiles.columns(parts.q0[of], parts.q1[of], k0, k1))
    part, owner = np.concatenate([part, of]), np.concatenate([layout.owner[chunk], owner])
    return tiles, rank[part], owner, slide[part]


def _chunks_of_all(parts: Tiles, edges: Ints) -> tuple[Ints, Ints]:
    """Return the first and the end of the chunks whose keys all queries of each part see."""
    k0 = np.where(parts.lo == -OPEN, parts.k0, np.maximum(parts.k0, parts.q1 - 1 + parts.lo))
    k1 = np.where(parts.hi == OPEN, parts.k1, np.minimum(parts.k1, parts.q0 + parts.hi + 1))
    return np.searchsorted(edges, k0), np.searchsorted(edges, k1, "right") - 1


def _key_ranges(part: Ints, first: Ints, last: Ints, layout: Layout) -> Ints:
    """Return the keys of whole chunks [first, last) in the shards of their owners: int64 [4,
    tiles], the part, the owner, and the range of its shard.
    """
    which, owner = expand(np.zeros_like(part), np.full_like(part, layout.cp))
    k0, k1 = (_tokens_before(owner, chunk[which], layout) for chunk in (first, last))
    return np.stack([part[which], owner, k0, k1])[:, k0 < k1]


def _tokens_before(owner: Ints, chunk: Ints, layout: Layout) -> Ints:
    """Return the number of an owner's tokens in chunks before `chunk`."""
    order, count = layout.order, len(layout.owner) + 1
    place = np.searchsorted(layout.owner[order] * count + order, owner * count + chunk)
    return layout.axis[place] - layout.first[owner]


def tiles_in_stream(plan: PlanTables) -> tuple[Tiles, Ints, Ints]:
    """Return the plan's tiles in positions of the stream, cut where chunks meet, and the rank and
    hop of each.
    """
    layout, rank, source = plan.layout, plan.tile_rank, plan.tile_source
    on_axis = plan.tiles.shifted(layout.first[rank], layout.first[source])
    tiles, *chunks = split_at_edges(on_axis, layout.axis)
    slide, owner = layout.edges[layout.order] - layout.axis[:-1], layout.owner[layout.order]
    rank, source = (owner[chunk] for chunk in chunks)
    hop = np.array(plan.schedule)[ring_distance(rank, source, plan.cp)]
    return tiles.shifted(*(slide[chunk] for chunk in chunks)), rank, hop
