"""Cuts the pieces of a mask into tiles of shards: queries of one rank, keys of one owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cp_ring.plan.ranges import Ints, overlaps
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import Tiles, coalesce, cut, split_at_edges

if TYPE_CHECKING:
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.records import PlanTables

MOST = 1 << 16
"""The most tiles that are made before neighbors are joined, so that memory does not depend on the
pairs of chunks.
"""


def shard_tiles(
    pieces: Tiles, layout: Layout, member: int | None = None
) -> tuple[Tiles, Ints, Ints]:
    """Return fitted tiles that allow the pairs of `pieces`, each of one rank and one owner, in
    positions of their shards, sorted by rank and distance: (tiles, rank of each, ring distance of
    each from the owner of its keys). With `member`, only the tiles whose rank or owner it is.

    A shard holds its chunks in ascending order, so tiles of neighboring chunks are often one tile.
    """
    edges, owner, cp = layout.edges, layout.owner, layout.cp
    slide = layout.starts - edges[:-1]
    parts, piece, chunk = cut(pieces, edges)
    parts = parts.shifted(slide[chunk], 0)
    # A piece in many chunks gives a part for each rank, if all its queries see the same keys.
    many = np.bincount(piece)[piece] > 4 * cp
    alike = many & ~parts.banded
    rank, chunks = owner[chunk], np.arange(len(owner))
    if alike.any():
        place = np.where(alike, piece, len(pieces) + np.arange(len(parts)))
        count = len(pieces) + len(parts)
        parts, group = coalesce(parts, rank * count + place)
        rank = group // count
    work = [(np.arange(len(parts)), chunks)]
    if member is not None:
        mine = rank == member
        work = [(np.flatnonzero(mine), chunks), (np.flatnonzero(~mine), chunks[owner == member])]
    tables, groups = [pieces[:0]], [rank[:0]]
    for index, chunks in work:
        k0, k1 = parts.data[2:4, index]
        of, place = overlaps(k0, k1, edges[chunks], edges[chunks + 1])
        for begin in range(0, len(of), MOST):
            near = slice(begin, begin + MOST)
            part, chunk = index[of[near]], chunks[place[near]]
            tiles = parts[part].within(k0=edges[chunk], k1=edges[chunk + 1])
            tiles, part, chunk = tiles.living(part, chunk)
            tiles = tiles.shifted(0, slide[chunk])
            group = rank[part] * cp + ring_distance(rank[part], owner[chunk], cp)
            if len(of) > MOST:
                tiles, group = coalesce(tiles, group)
            tables.append(tiles)
            groups.append(group)
    tiles, group = coalesce(Tiles.concatenate(*tables), np.concatenate(groups))
    return tiles, *np.divmod(group, cp)


def tiles_in_stream(plan: PlanTables) -> tuple[Tiles, Ints, Ints]:
    """Return the plan's tiles in positions of the stream, cut where chunks meet, and the rank and
    hop of each.
    """
    layout, rank, source = plan.layout, plan.tile_rank, plan.tile_source
    on_axis = plan.tiles.shifted(layout.first[rank], layout.first[source])
    tiles, *chunks = split_at_edges(on_axis, layout.axis, layout.axis)
    slide, owner = layout.edges[layout.order] - layout.axis[:-1], layout.owner[layout.order]
    rank, source = (owner[chunk] for chunk in chunks)
    hop = np.array(plan.schedule)[ring_distance(rank, source, plan.cp)]
    return tiles.shifted(*(slide[chunk] for chunk in chunks)), rank, hop
