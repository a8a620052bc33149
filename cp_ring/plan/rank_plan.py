"""Makes one rank's plan from the tables of all ranks. Its tokens are counted in the buffers that
the executor holds.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import NamedTuple

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, sort_index, starts_of
from cp_ring.plan.records import Hop, PlanTables, RankPlan, Transfer, Transfers
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import Tiles, coalesce


class _HopBuffers:
    """A rank's buffers, one for each hop, in which the ranges of a table of messages lie end to
    end. At hop 0 the buffer is the rank's whole shard. Tokens have their places on the axis of all
    shards (`Layout.axis`).
    """

    def __init__(self, layout: Layout, rank: int, table: Transfers):
        self._first = layout.first
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

    def messages(
        self, table: Transfers, peer: str, holder: str
    ) -> defaultdict[int, list[Transfer]]:
        """Return the messages of a table by hop, one transfer for each peer and buffer.

        `peer` names the other end of the messages (`sender` or `receiver`), `holder` the end whose
        buffer is that of the message's hop. The distance of the holder orders the messages of
        several owners at both ends.
        """
        other, slide = getattr(table, peer), self.slide(table.owner, table.start)
        far = ring_distance(getattr(table, holder), table.owner, len(self.sizes))
        sort = sort_index(table.hop, other, far, table.start)
        # `Transfer.buffer` is 0 for the buffer of the message's own hop.
        buffer = table.buffer * (peer == holder)
        rows = np.stack([table.hop, other, buffer, table.start + slide, table.end + slide])
        found = defaultdict[int, list[Transfer]](list)
        for (hop, *to), group in groupby(rows[:, sort].T.tolist(), key=lambda row: row[:3]):
            ranges = tuple((start, end) for *_, start, end in group)
            found[hop].append(Transfer(to[0], ranges, to[1]))
        return found


def rank_plan(plan: PlanTables, rank: int) -> RankPlan:
    """Return the plan of one rank, made from the tables of all ranks."""
    cp, layout = plan.cp, plan.layout
    # keys arrive in one buffer of a hop, and gradients leave the other
    arriving, leaving = plan.transfers.where("receiver", rank), plan.gradients.where("sender", rank)
    keys, grads = (_HopBuffers(layout, rank, table) for table in (arriving, leaving))
    sent = plan.transfers_by_sender.where("sender", rank)
    returned = plan.gradients_by_receiver.where("receiver", rank)
    tiles, tile_hop, grad_shift, tile_far = _own_tiles(plan, rank, keys, grads)
    messages = {
        "receives": keys.messages(arriving, "sender", "receiver"),
        "sends": keys.messages(sent, "receiver", "receiver"),
        "grad_sends": grads.messages(leaving, "receiver", "sender"),
        "grad_receives": grads.messages(returned, "sender", "sender"),
    }
    far = [ring_distance(rank, table.owner, cp) for table in (arriving, leaving)]
    distances = np.flatnonzero(np.bincount(np.concatenate([[0], tile_far, *far])))
    hop_of = np.array(plan.schedule)[distances]
    hops = []
    for index in range(plan.schedule[-1] + 1):
        own = slice(*np.searchsorted(tile_hop, [index, index + 1]))
        moves = {name: tuple(of_hop[index]) for name, of_hop in messages.items()}
        sources = tuple(((rank - distances[hop_of == index]) % cp).tolist())
        if own.start < own.stop or any(moves.values()):
            hop = Hop(
                index, sources, tiles[own], grad_shift[own], int(keys.sizes[index]),
                int(grads.sizes[index]), **moves,
            )  # fmt: skip
            hops.append(hop)
    return RankPlan(
        rank, cp, int(keys.sizes[0]), tuple(hops), layout.rows, identity(plan),
        len(plan.mask.pieces),
        forwards=bool((plan.transfers.sender != plan.transfers.owner).any()),
    )  # fmt: skip


def _own_tiles(
    plan: PlanTables, rank: int, keys: _HopBuffers, grads: _HopBuffers
) -> tuple[Tiles, Ints, Ints, Ints]:
    """Return a rank's tiles with keys counted in the key buffer of their hop, their hops, the shift
    from there to the gradient buffer, and the distances from which keys come.

    At hops with several sources, tiles whose keys lie end to end in both buffers are joined into
    one kernel call.
    """
    mine = slice(*np.searchsorted(plan.tile_rank, [rank, rank + 1]))
    tiles, hop, source = plan.tiles[mine], plan.tile_hop[mine], plan.tile_source[mine]
    far = ring_distance(rank, source, plan.cp)
    slide = keys.slide(source, tiles.k0)
    shift = grads.slide(source, tiles.k0) - slide
    tiles = tiles.shifted(0, slide)
    several = np.zeros(int(hop.max(initial=0)) + 1, bool)
    several[hop[1:][(hop[1:] == hop[:-1]) & (far[1:] != far[:-1])]] = True
    join = several[hop]
    if not join.any():
        return tiles, hop, shift, far
    places, group = np.unique(np.stack([hop[join], shift[join]]), axis=1, return_inverse=True)
    joined, group = coalesce(tiles[join], group.reshape(-1))
    hop, shift = (
        np.concatenate([x[~join], place[group]])
        for x, place in zip((hop, shift), places, strict=True)
    )
    sort = np.argsort(hop, kind="stable")
    return Tiles.concatenate(tiles[~join], joined)[sort], hop[sort], shift[sort], far


_MAX_WORDS = 80


class Fact(NamedTuple):
    """A fact that all ranks must agree on, such as a part of a plan's identity. `content` is
    compared, `words` are for the error message.
    """

    name: str
    content: str
    words: str

    @classmethod
    def of(cls, name: str, value: object) -> Fact:
        return cls(name, str(value), str(value))


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
