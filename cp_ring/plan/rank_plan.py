"""Makes one rank's plan from the tables of all ranks. Its tokens are counted in the buffers that
the executor holds.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from operator import itemgetter

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, sort_index, starts_of
from cp_ring.plan.records import Fact, Hop, PlanTables, RankPlan, Transfer, Transfers
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import Tiles, coalesce


class _HopBuffers:
    """A rank's buffers, one for each hop, in which the ranges of a table of messages lie end to
    end. At hop 0 the buffer is the rank's whole shard. Tokens have their places on the axis of all
    shards (`Layout.axis`).
    """

    def __init__(self, layout: Layout, rank: int, table: Transfers):
        self.table, self._first = table, layout.first
        size = table.tokens
        before = starts_of(size)
        begin = np.append(0, before - before[np.searchsorted(table.hop, table.hop)])
        place = np.append(self._first[rank], self._first[table.owner] + table.start)
        order = np.argsort(place, kind="stable")
        self._place, self._slide = place[order], (begin - place)[order]
        self.sizes = np.bincount(table.hop, size, layout.cp).astype(np.int64)
        self.sizes[0] = layout.tokens_per_rank[rank]

    def slide(self, owner: Ints, start: Ints) -> Ints:
        """Return the number to add to a token of the owner's shard for its place in the buffer that
        holds it.
        """
        first = self._first[owner]
        return first + self._slide[np.searchsorted(self._place, first + start, "right") - 1]


def rank_plan(plan: PlanTables, rank: int) -> RankPlan:
    """Return the plan of one rank, made from the tables of all ranks."""
    cp, layout = plan.cp, plan.layout
    # keys arrive in one buffer of a hop, and gradients leave the other
    keys = _HopBuffers(layout, rank, plan.transfers.where("receiver", rank))
    grads = _HopBuffers(layout, rank, plan.gradients.where("sender", rank))
    leaving = plan.transfers_by_sender.where("sender", rank)
    grads_arriving = plan.gradients_by_receiver.where("receiver", rank)
    tiles, tile_hop, grad_shift = _own_tiles(plan, rank, keys, grads)
    messages = (
        _messages(keys.table, "sender", "receiver", cp, keys),
        _messages(leaving, "receiver", "receiver", cp, keys),
        _messages(grads.table, "receiver", "sender", cp, grads),
        _messages(grads_arriving, "sender", "sender", cp, grads),
    )
    hops = []
    for index in sorted(set(tile_hop.tolist()).union(*messages)):
        own = slice(*np.searchsorted(tile_hop, [index, index + 1]))
        receives, sends, grad_sends, grad_receives = (each.get(index, ()) for each in messages)
        hop = Hop(
            index,
            tiles[own],
            int(keys.sizes[index]),
            receives,
            sends,
            int(grads.sizes[index]),
            grad_shift[own],
            grad_sends,
            grad_receives,
        )
        hops.append(hop)
    return RankPlan(
        rank,
        cp,
        int(keys.sizes[0]),
        tuple(hops),
        layout.rows,
        identity(plan),
        len(plan.mask.pieces),
        forwards=bool((plan.transfers.sender != plan.transfers.owner).any()),
    )


def _own_tiles(
    plan: PlanTables, rank: int, keys: _HopBuffers, grads: _HopBuffers
) -> tuple[Tiles, Ints, Ints]:
    """Return a rank's tiles with keys counted in the key buffer of their hop, their hops, and the
    shift from there to the gradient buffer.

    Tiles whose keys lie end to end in both buffers, as those of several sources, are joined into
    one kernel call.
    """
    mine = slice(*np.searchsorted(plan.tile_rank, [rank, rank + 1]))
    tiles, hop, source = plan.tiles[mine], plan.tile_hop[mine], plan.tile_source[mine]
    slide = keys.slide(source, tiles.k0)
    shift = grads.slide(source, tiles.k0) - slide
    places, group = np.unique(np.stack([hop, shift]), axis=1, return_inverse=True)
    tiles, group = coalesce(tiles.shifted(0, slide), group.reshape(-1))
    hop, shift = places[:, group]
    return tiles, hop, shift


def _messages(
    table: Transfers, peer: str, holder: str, cp: int, buffers: _HopBuffers
) -> dict[int, tuple[Transfer, ...]]:
    """Return the messages of a table by hop, with ranges counted in this rank's buffers: one
    transfer for each peer and buffer.

    `peer` names the other end of the messages (`sender` or `receiver`), `holder` the end whose
    buffer is that of the message's hop. The distance of the holder from the owner orders the
    messages of several owners at both ends.
    """
    peers: Ints = getattr(table, peer)
    # `Transfer.buffer` is 0 for the buffer of the message's own hop.
    named = table.buffer if peer == holder else np.zeros_like(peers)
    slide = buffers.slide(table.owner, table.start)
    of_holder = ring_distance(getattr(table, holder), table.owner, cp)
    sort = sort_index(table.hop, peers, of_holder, table.start)
    rows = np.stack([table.hop, peers, named, table.start + slide, table.end + slide])[:, sort]
    found = defaultdict[int, tuple[Transfer, ...]](tuple)
    for (hop, to, buffer), group in groupby(rows.T.tolist(), itemgetter(0, 1, 2)):
        found[hop] += (Transfer(to, tuple((start, end) for *_, start, end in group), buffer),)
    return found


_MAX_WORDS = 80


def identity(plan: PlanTables) -> tuple[Fact, ...]:
    """Return the facts from which a plan is made: mask, layout, route and schedule.

    The tables are not among them: they follow from these parts, and `PlanSpec.build_rank_plan`
    makes one rank's share of the tables only.
    """
    words = str(plan.schedule)
    words = words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."
    return (
        Fact("mask", plan.mask.digest, repr(plan.mask)),
        Fact("layout", plan.layout.digest, repr(plan.layout)),
        Fact("route", repr(plan.route), plan.route),
        Fact("schedule", repr(plan.schedule), words),
    )
