"""RingPlan: for each rank and hop, the tiles to compute and the token ranges to move, as data.

At hop t a rank computes on the keys of one source rank: its own at hop 0, later those of rank (r - t) mod cp. The plan
is two tables over all ranks: tiles (which rank computes what, at which hop) and transfers (which token ranges of whose
keys move between which ranks, at which hop). `plan.row(rank)` is one rank's view, which the executor runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.tiles import Ints, Tiles, coalesce


@dataclass(frozen=True)
class Transfer:
    """Rows `[start, end)` of a buffer, sent to or received from `peer`, one message for each range.

    `buffer` tells whose rows: 0 is the rank's own shard, t > 0 the buffer of hop t.
    """

    peer: int
    ranges: tuple[tuple[int, int], ...]
    buffer: int = 0

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def packed(self, first: int = 0) -> Transfer:
        """The same messages laid end to end from row `first` of another buffer."""
        cuts = list(accumulate((end - start for start, end in self.ranges), initial=first))
        return Transfer(self.peer, tuple(pairwise(cuts)), self.buffer)


@dataclass(frozen=True, eq=False)
class Hop:
    """What one rank does at one hop.

    Keys: `receive` fills the `num_keys` rows of this hop's key buffer (at hop 0 it is the rank's own shard, and nothing
    is received); `sends` leave at the same time. Both are posted before the hop before this one is computed.

    Tiles: rows of the rank's shard, columns of this hop's key buffer.

    Gradients, backward only: column k of tile i belongs to row `k + grad_shift[i]` of this hop's gradient buffer of
    `num_grads` rows. Once computed, `grad_sends` leave from that buffer, and `grad_receives` are added to the rank's own
    accumulators (`buffer` 0) or to the gradient buffer of a later hop.
    """

    index: int
    source: int
    tiles: Tiles
    num_keys: int
    receive: Transfer | None
    sends: tuple[Transfer, ...]
    num_grads: int
    grad_shift: Ints
    grad_sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's hops, dead ones left out."""

    rank: int
    cp: int
    num_rows: int
    hops: tuple[Hop, ...]

    @property
    def max_keys(self) -> int:
        """Rows of the largest key buffer that a hop receives."""
        return max((hop.num_keys for hop in self.hops if hop.receive), default=0)

    @property
    def max_grads(self) -> int:
        """Rows of the largest gradient buffer of a hop other than hop 0."""
        return max((hop.num_grads for hop in self.hops if hop.index), default=0)

    @property
    def max_grad_receives(self) -> int:
        """Rows of the most gradients that arrive at one hop."""
        return max((sum(t.tokens for t in hop.grad_receives) for hop in self.hops), default=0)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Tiles and transfers of all ranks.

    tiles: rows of the rank's shard, columns of the source's shard; `tile_rank` and `tile_hop` int64 [tiles].
    transfers: int64 [5, transfers]: hop, source rank, destination rank, and a row range of the source's shard.
    """

    mask: Mask
    layout: Layout
    route: str
    tiles: Tiles
    tile_rank: Ints
    tile_hop: Ints
    transfers: Ints
    _rows: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, mask: Mask, layout: Layout, route: str = "direct") -> RingPlan:
        """The plan of all ranks. Raises `PlanError` when mask and layout differ in length, or the route is unknown."""
        if mask.n != layout.n:
            raise PlanError(f"the mask is for {mask.n} tokens, the layout for {layout.n}")
        if route not in ROUTES:
            raise PlanError(f"unknown route {route!r}; known are {', '.join(ROUTES)}")
        tiles, query_chunk, key_chunk = cut(mask.pieces, layout.edges)
        rank, source = layout.owner[query_chunk], layout.owner[key_chunk]
        hop = (rank - source) % layout.cp
        edges, starts = layout.edges, layout.starts
        tiles = tiles.shifted(starts[query_chunk] - edges[query_chunk], starts[key_chunk] - edges[key_chunk])
        tiles, group = coalesce(tiles, rank * layout.cp + hop)
        rank, hop = np.divmod(group, layout.cp)
        return cls(mask, layout, route, tiles, rank, hop, ROUTES[route](tiles, rank, hop, layout.cp))

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def n(self) -> int:
        return self.layout.n

    def row(self, rank: int) -> RankPlan:
        """The part of one rank, with tile columns counted in the packed key buffer of their hop."""
        if rank not in self._rows:
            self._rows[rank] = self._row(rank)
        return self._rows[rank]

    def _row(self, rank: int) -> RankPlan:
        when, source, destination, start, end = self.transfers
        hops = []
        for index in range(self.cp):
            mine = self.tiles[(self.tile_rank == rank) & (self.tile_hop == index)]
            arriving = np.flatnonzero((destination == rank) & (when == index))
            leaving = np.flatnonzero((source == rank) & (when == index))
            origin = (rank - index) % self.cp
            num_keys, receive = int(self.layout.tokens_per_rank[origin]), None
            if index:
                mine, num_keys = _pack(mine, start[arriving], end[arriving])
                cuts = np.cumsum(np.append(0, end[arriving] - start[arriving])).tolist()
                receive = Transfer(origin, tuple(zip(cuts, cuts[1:], strict=False))) if len(arriving) else None
            sends = tuple(
                Transfer(int(peer), tuple((int(start[i]), int(end[i])) for i in leaving[destination[leaving] == peer]))
                for peer in np.unique(destination[leaving])
            )
            if len(mine) or receive or sends:
                # Gradients of the direct route take the same ways back: what was received is sent, what was sent returns.
                back = () if receive is None else (receive,)
                shift = np.zeros(len(mine), np.int64)
                hops.append(Hop(index, origin, mine, num_keys, receive, sends, num_keys, shift, back, sends))
        return RankPlan(rank, self.cp, int(self.layout.tokens_per_rank[rank]), tuple(hops))


def cut(pieces: Tiles, edges: Ints) -> tuple[Tiles, Ints, Ints]:
    """Pieces of a mask cut at chunk edges, rows and columns: (tiles, query chunk, key chunk)."""
    piece, chunk = _overlaps(pieces.q0, pieces.q1, edges)
    open_ = np.full(len(piece), 1 << 60)
    strips = pieces[piece].within(edges[chunk], edges[chunk + 1], -open_, open_)
    live = np.flatnonzero(strips.q0 < strips.q1)
    strips, chunk = strips[live], chunk[live]
    strip, key_chunk = _overlaps(strips.k0, strips.k1, edges)
    tiles = strips[strip].within(-open_[:1], open_[:1], edges[key_chunk], edges[key_chunk + 1])
    live = np.flatnonzero(tiles.q0 < tiles.q1)
    return tiles[live], chunk[strip[live]], key_chunk[live]


def _overlaps(start: Ints, end: Ints, edges: Ints) -> tuple[Ints, Ints]:
    """All (range, chunk) pairs that overlap."""
    first = np.searchsorted(edges, start, side="right") - 1
    count = np.searchsorted(edges, end, side="left") - first
    which = np.repeat(np.arange(len(start)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]


def direct(tiles: Tiles, rank: Ints, hop: Ints, cp: int) -> Ints:
    """Each owner sends what a rank's tiles read straight to that rank, at the hop that reads it."""
    away = np.flatnonzero(hop > 0)
    group, start, end = union(rank[away] * cp + hop[away], tiles.k0[away], tiles.k1[away])
    destination, when = np.divmod(group, cp)
    return np.stack([when, (destination - when) % cp, destination, start, end])


ROUTES = {"direct": direct}


def union(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each group: sorted, disjoint, not touching."""
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    base = group * (int(end.max(initial=0)) + 1)
    reach = np.maximum.accumulate(end + base)
    fresh = np.append(True, (start + base)[1:] > reach[:-1])[: len(group)]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(group)) - 1 if len(first) else first
    return group[first], start[first], (reach - base)[last]


def _pack(tiles: Tiles, start: Ints, end: Ints) -> tuple[Tiles, int]:
    """Tile columns renumbered from the source's shard to the received ranges laid end to end."""
    offset = np.cumsum(end - start) - (end - start) - start
    where = np.searchsorted(start, tiles.k0, side="right") - 1
    return tiles.shifted(0, offset[where]), int((end - start).sum())


