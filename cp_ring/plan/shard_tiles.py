"""Cuts the pieces of a mask into tiles of shards: queries of one rank, keys of one owner."""

from __future__ import annotations

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, overlaps
from cp_ring.plan.records import PlanTables
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import OPEN, Tiles, coalesce, split_at_edges

def shard_tiles(
    pieces: Tiles, layout: Layout, member: int | None = None
) -> tuple[Tiles, Ints, Ints]:
    """Return fitted tiles that allow the pairs of `pieces`, each of one rank and one owner, in
    positions of their shards: (tiles, rank of each, owner of each). With `member`, only the tiles
    whose rank or owner it is.

    A tile for each pair of chunks would give millions of tiles where a document has thousands of
    chunks. A shard holds its chunks in ascending order, so the keys of an owner within a range of
    the stream are one range of its shard. So are the queries of a piece that see the same keys.
    """
    edges, owner = layout.edges, layout.owner
    piece, chunk = overlaps(pieces.q0, pieces.q1, edges[:-1], edges[1:])
    parts = pieces[piece].within(edges[chunk], edges[chunk + 1])
    live = parts.live()
    piece, chunk = piece[live], chunk[live]
    parts = parts[live].shifted((layout.starts - edges[:-1])[chunk], 0)
    # A piece in many chunks gives a part for each rank, if all its queries see the same keys.
    many = np.bincount(piece)[piece] > 4 * layout.cp
    alike = many & (parts.lo == -OPEN) & (parts.hi == OPEN)
    place = np.where(alike, piece, len(pieces) + np.arange(len(parts)))
    count = len(pieces) + len(parts) + 1
    parts, group = coalesce(parts, owner[chunk] * count + place)
    rank = group // count
    if member is None:
        return _key_parts(parts, rank, layout)
    mine, others = np.flatnonzero(rank == member), np.flatnonzero(rank != member)
    own = np.flatnonzero(owner == member)
    found = (
        _key_parts(parts[mine], rank[mine], layout),
        _key_parts(parts[others], rank[others], layout, own),
    )
    tables, ranks, owners = zip(*found, strict=True)
    return Tiles.concatenate(*tables), np.concatenate(ranks), np.concatenate(owners)


def _key_parts(
    parts: Tiles, rank: Ints, layout: Layout, chunks: Ints | None = None
) -> tuple[Tiles, Ints, Ints]:
    """Return the parts cut by the chunks of their keys, or by these `chunks` alone, with keys in
    their shards: (tiles, rank of each, owner of each).

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
    return tiles, rank[part], owner


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
