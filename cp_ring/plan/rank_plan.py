"""Makes one rank's plan from the tables of all ranks. Its tokens are counted in the buffers that
the executor holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, sort_index, starts_of
from cp_ring.plan.records import Fact, Hop, PlanTables, RankPlan, Transfer, Transfers
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tiles import Tiles, coalesce

Slide = Callable[[Ints, Ints], Ints]
"""A function from owners and tokens of their shards to the numbers that, added to the tokens, give
their places in the buffers that hold them.
"""


def _slides(layout: Layout, rank: int, table: Transfers) -> Slide:
    """Return the `Slide` of a rank's buffers, one for each hop, in which the ranges of a table of
    messages lie end to end. At hop 0 the buffer is the rank's whole shard. Tokens have their places
    on the axis of all shards (`Layout.axis`).
    """
    first, before = layout.first, starts_of(table.tokens)
    begin = np.append(0, before - before[np.searchsorted(table.hop, table.hop)])
    place = np.append(first[rank], first[table.owner] + table.start)
    order = np.argsort(place, kind="stable")
    places, slides = place[order], (begin - place)[order]

    def slide(owner: Ints, start: Ints) -> Ints:
        to_axis = first[owner]
        return to_axis + slides[np.searchsorted(places, to_axis + start, "right") - 1]

    return slide


def rank_plan(plan: PlanTables, rank: int) -> RankPlan:
    """Return the plan of one rank, made from the tables of all ranks."""
    layout, back = plan.layout, plan.of_backward
    return RankPlan(
        rank,
        plan.cp,
        int(layout.tokens_per_rank[rank]),
        _hops(plan, rank),
        layout.rows,
        identity(plan),
        len(plan.mask.pieces),
        forwards=bool((plan.transfers.sender != plan.transfers.owner).any()),
        back=None if back is None else _hops(back, rank),
    )


def _hops(plan: PlanTables, rank: int) -> tuple[Hop, ...]:
    """Return the hops of a rank at which it computes or moves something."""
    cp, layout = plan.cp, plan.layout
    # keys arrive in one buffer of a hop, and gradients leave the other
    arriving = plan.transfers[plan.transfers.receiver == rank]
    grads_leaving = plan.gradients[plan.gradients.sender == rank]
    # where no gradients leave, tiles have one buffer
    buffers = arriving, arriving if plan.of_backward else grads_leaving
    num_keys, num_grads = (
        np.bincount(table.hop, table.tokens, cp).astype(np.int64).tolist() for table in buffers
    )
    num_keys[0] = num_grads[0] = int(layout.tokens_per_rank[rank])
    keys, grads = (_slides(layout, rank, table) for table in buffers)
    tiles, tile_hop, grad_shift = _own_tiles(plan, rank, keys, grads)
    receives = _messages(arriving, "sender", "receiver", cp, keys)
    sends = _messages(
        plan.transfers[plan.transfers.sender == rank], "receiver", "receiver", cp, keys
    )
    grad_sends, grad_receives = receives, sends
    if plan.gradients is not plan.transfers.turned:
        grads_arriving = plan.gradients[plan.gradients.receiver == rank]
        grad_sends = _messages(grads_leaving, "receiver", "sender", cp, grads)
        grad_receives = _messages(grads_arriving, "sender", "sender", cp, grads)
    messages = receives, sends, grad_sends, grad_receives
    indices = np.array(sorted(set(tile_hop.tolist()).union(*messages)), np.int64)
    ends = np.searchsorted(tile_hop, np.stack([indices, indices + 1]))
    return tuple(
        Hop(
            index,
            tiles[start:end],
            num_keys[index],
            receives[index],
            sends[index],
            num_grads[index],
            grad_shift[start:end],
            grad_sends[index],
            grad_receives[index],
        )
        for index, start, end in zip(*np.vstack([indices, ends]).tolist(), strict=True)
    )


def _own_tiles(plan: PlanTables, rank: int, keys: Slide, grads: Slide) -> tuple[Tiles, Ints, Ints]:
    """Return a rank's tiles with keys counted in the key buffer of their hop, their hops, and the
    shift from there to the gradient buffer.

    Tiles whose keys lie end to end in both buffers, as those of several sources, are joined into
    one kernel call.
    """
    mine = slice(*np.searchsorted(plan.tile_rank, [rank, rank + 1]))
    tiles, hop, source = plan.tiles[mine], plan.tile_hop[mine], plan.tile_source[mine]
    slide = keys(source, tiles.k0)
    shift = grads(source, tiles.k0) - slide
    least, most = int(shift.min(initial=0)), int(shift.max(initial=0)) + 1
    group = hop * (most - least) + shift - least
    tiles, group = coalesce(tiles.shifted(0, slide), group)
    hop, shift = np.divmod(group, most - least)
    return tiles, hop, shift + least


def _messages(
    table: Transfers, peer: str, holder: str, cp: int, buffers: Slide
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
    slide = buffers(table.owner, table.start)
    of_holder = ring_distance(getattr(table, holder), table.owner, cp)
    sort = sort_index(table.hop, peers, of_holder, table.start)
    rows = np.array([table.hop, peers, named, table.start + slide, table.end + slide])[:, sort]
    first = np.flatnonzero(np.diff(rows[:3], prepend=-1).any(0))
    ranges = list(zip(*rows[3:].tolist(), strict=True))
    found = defaultdict[int, tuple[Transfer, ...]](tuple)
    for low, high in pairwise([*first.tolist(), len(ranges)]):
        hop, to, buffer = rows[:3, low].tolist()
        found[hop] += (Transfer(to, tuple(ranges[low:high]), buffer),)
    return found


def identity(plan: PlanTables) -> tuple[Fact, ...]:
    """Return the facts from which a plan is made: mask, layout, route and schedule.

    The tables are not among them: they follow from these parts, and `PlanSpec.build_rank_plan`
    makes one rank's share of the tables only.
    """
    hops = plan.schedule, plan.backward.schedule
    return (
        Fact("mask", plan.mask.digest, repr(plan.mask)),
        Fact("layout", plan.layout.digest, repr(plan.layout)),
        Fact("route", repr(plan.route), plan.route),
        Fact("schedule", repr(hops), f"{plan.schedule!r:.80}"),
    )
