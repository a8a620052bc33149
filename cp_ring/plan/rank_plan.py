"""One rank's plan, made from the tables of all ranks. Its tokens are counted in the buffers that the executor holds."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from cp_ring.plan.identity import identity
from cp_ring.plan.ranges import Ints, sort_index
from cp_ring.plan.tables import Hop, Hops, PlanTables, RankPlan, Transfer, Transfers


class _HopBuffers:
    """One buffer for each hop, in which the hop's ranges of a shard lie end to end; that of hop 0 is the whole shard."""

    def __init__(self, ranges: Transfers, num_tokens: int, cp: int):
        self._hop, self._start, size = ranges.hop, ranges.start, ranges.tokens
        self._span = int(ranges.end.max(initial=0)) + 1
        before = np.cumsum(size) - size
        self._slide = before - before[np.searchsorted(self._hop, self._hop)] - self._start
        self.sizes = np.bincount(self._hop, size, cp).astype(np.int64)
        self.sizes[0] = num_tokens

    def slide(self, hop: Ints, start: Ints) -> Ints:
        """What to add to a token of the shard to get its place in the hop's buffer."""
        if not len(self._hop):
            return np.zeros_like(hop)
        key = hop * self._span + np.minimum(start, self._span - 1)
        place = np.searchsorted(self._hop * self._span + self._start, key, "right") - 1
        return np.where(hop == 0, 0, self._slide[place])


def rank_plan(plan: PlanTables, rank: int) -> RankPlan:
    """The plan of one rank, from the tables of all ranks."""
    cp, num_tokens = plan.cp, int(plan.layout.tokens_per_rank[rank])
    mine = slice(*np.searchsorted(plan.tile_rank, [rank, rank + 1]))
    tiles, tile_hop = plan.tiles[mine], plan.tile_hop[mine]
    arriving = plan.transfers.where("receiver", rank)
    leaving = plan.transfers_by_sender.where("sender", rank)
    grads_leaving = plan.gradients.where("sender", rank)
    grads_arriving = plan.gradients_by_receiver.where("receiver", rank)

    live = np.zeros(cp, bool)
    for hop in (tile_hop, arriving.hop, leaving.hop, grads_leaving.hop, grads_arriving.hop):
        live[hop] = True
    source = np.full(cp, -1)
    source[0] = rank
    source[tile_hop] = plan.tile_source[mine]
    for table in (arriving, grads_leaving):
        source[table.hop] = table.owner

    keys, grads = _HopBuffers(arriving, num_tokens, cp), _HopBuffers(grads_leaving, num_tokens, cp)
    key_slide = keys.slide(tile_hop, tiles.k0)
    grad_shift = grads.slide(tile_hop, tiles.k0) - key_slide
    tiles = tiles.shifted(0, key_slide)
    receives = _Messages(arriving, "sender", arriving.hop, keys)
    sends = _Messages(leaving, "receiver", leaving.buffer, keys)
    grad_sends = _Messages(grads_leaving, "receiver", grads_leaving.hop, grads)
    grad_receives = _Messages(grads_arriving, "sender", grads_arriving.buffer, grads)

    def make(index: int) -> Hop:
        here = slice(*np.searchsorted(tile_hop, [index, index + 1]))
        return Hop(
            index=index,
            source=int(source[index]),
            tiles=tiles[here],
            num_keys=int(keys.sizes[index]),
            receive=next(iter(receives.at(index)), None),
            sends=sends.at(index),
            num_grads=int(grads.sizes[index]),
            grad_shift=grad_shift[here],
            grad_sends=grad_sends.at(index),
            grad_receives=grad_receives.at(index),
        )

    return RankPlan(rank, cp, num_tokens, Hops(make, np.flatnonzero(live).tolist()), plan.layout.rows, identity(plan))


class _Messages:
    """The messages of a table, with ranges counted in the buffers of the hops `buffer`. `peer` is the other end's field."""

    def __init__(self, table: Transfers, peer: str, buffer: Ints, buffers: _HopBuffers):
        slide, peers = buffers.slide(buffer, table.start), getattr(table, peer)
        # `Transfer.buffer` is 0 for the buffer of the message's own hop.
        named = np.where(buffer == table.hop, 0, buffer)
        sort = sort_index(table.hop, peers, named, table.start)
        self._hop = table.hop[sort]
        self._messages = np.stack([peers, named, table.start + slide, table.end + slide])[:, sort]

    def at(self, hop: int) -> tuple[Transfer, ...]:
        """The messages of one hop, one transfer for each peer and buffer."""
        messages = self._messages[:, slice(*np.searchsorted(self._hop, [hop, hop + 1]))].T.tolist()
        groups = groupby(messages, key=lambda message: message[:2])
        return tuple(Transfer(peer, tuple((start, end) for _, _, start, end in group), named) for (peer, named), group in groups)
