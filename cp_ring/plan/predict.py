"""Predicted times of plans, over two classes of links: inside a node, and between nodes through network cards.

In this model a hop of a rank lasts as long as the longest of three things: what it computes, what arrives during it, and what
leaves during it. These are the keys of the next hop, and in backward also the gradients of the last one. A network card may
be shared by several ranks: then what all of them send or receive at a hop goes through it. Merges, sums, kernel calls and
exchanges of heads cost time besides. Where ranks exchange heads, the exchange of one group of heads hides behind attention on
another; that of the first group before attention and that of the last one after it are exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.blocks import blocked_pairs
from cp_ring.plan.cost import AttentionSizes, Cost, RankUpdates, accumulator_bytes, cost, exchanged, rank_updates, work_of_hops
from cp_ring.plan.head_split import split_heads
from cp_ring.plan.lower import Capabilities, lower
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rank_plan import rank_tiles
from cp_ring.plan.rates import RATES, Rates
from cp_ring.plan.tables import PlanTables, Transfers
from cp_ring.plan.verify import Report

Floats = NDArray[np.float64]

SAMPLED_RANKS = 3
"""Rank plans of which merges and kernel calls are counted where not all are: the first, one in the middle, the last."""


class Prediction(NamedTuple):
    """Seconds of one layer's attention on the slowest rank, of forward and of forward and backward together.

    exposed_forward, exposed_both: what this rank waits for transfers.
    efficiency_forward, efficiency_both: speed relative to one kernel call on the whole sequence, divided evenly among ranks.
    bytes_per_card: keys, values and exchanged heads in forward that the busiest network card sends or receives.
    """

    forward: float
    both: float
    exposed_forward: float
    exposed_both: float
    efficiency_forward: float
    efficiency_both: float
    bytes_per_card: int


class Links:
    """The links of ranks of which each `ranks_per_node` neighboring ones share a node."""

    def __init__(self, ranks: int, ranks_per_node: int, rates: Rates):
        rank = np.arange(ranks)
        self.ranks, self.rates, self.node = ranks, rates, rank // ranks_per_node
        cards = -(-ranks_per_node // rates.ranks_per_card)
        self.card = self.node * cards + rank % ranks_per_node // rates.ranks_per_card

    def amounts(self, sender: Ints, receiver: Ints, size: Ints, hop: Ints | int = 0, hops: int = 1) -> Ints:
        """Bytes of each rank, [4, ranks, hops]: in and out inside its node, in and out through its network card."""
        crosses = self.node[sender] != self.node[receiver]
        tables = []
        for of_link in (~crosses, crosses):
            for rank in (receiver, sender):
                index = (rank * hops + hop)[of_link]
                tables.append(np.bincount(index, size[of_link], self.ranks * hops).reshape(self.ranks, hops))
        for table in tables[2:]:
            of_card = np.zeros((int(self.card.max()) + 1, hops))
            np.add.at(of_card, self.card, table)
            table[:] = of_card[self.card]
        return np.stack(tables).astype(np.int64)

    def seconds(self, amounts: Ints) -> Floats:
        """Time of amounts, [4, ...]; the directions and classes of links are busy at the same time."""
        inside, between = amounts[:2] / self.rates.inside, amounts[2:] / self.rates.between
        return np.maximum(inside.max(0), between.max(0))


def predict(
    plan: Plan,
    report: Report,
    sizes: AttentionSizes,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
    updates: Mapping[int, RankUpdates] | None = None,
) -> Prediction:
    """Times of a proven plan for a layer of these sizes, all heads together.

    `ranks_per_node` neighboring ranks share a node. `updates` has those of some ranks of the ring (`rank_updates`); by default
    a few are taken. Those of the others are taken to be as large as the largest of these.
    """
    ring, heads = plan.ring, plan.ulysses
    split, links = split_heads(sizes.heads, sizes.kv_heads, heads), Links(plan.cp, ranks_per_node, rates)
    sizes = sizes.exchanging(heads)
    own, groups = sizes.of_rank(heads), split.groups if heads > 1 else 1
    exact = cost(report, own)
    costs = exact if rates.block == 1 else _in_blocks(exact, ring, report, rates.block)
    of_places = zip(*(sizes.on_wire(sum(len(group[place]) for group in split.repeated)) for place in range(heads)), strict=True)
    tables = zip((ring.transfers, ring.gradients), of_places, strict=True)
    keys, gradients = (_ring_amounts(links, table, list(bytes_per_token)) for table, bytes_per_token in tables)
    loads = _overheads(plan, own, rates, groups, updates)
    exchange = _exchange_amounts(plan, links, sizes) if heads > 1 else np.zeros((4, 4, plan.cp), np.int64)
    before, after, back_before, back_after = (links.seconds(amounts) for amounts in exchange)
    of_exchange = 2 * groups * rates.call if heads > 1 else 0.0  # before and after attention, in forward and in backward
    slowest, waits = np.zeros(2), np.zeros(2)
    for rank in range(plan.cp):
        busy, times = _hop_times(costs, rank // heads, links, keys[:, rank], gradients[:, rank])
        for which, (first, last) in enumerate(((before[rank], after[rank]), (back_before[rank], back_after[rank]))):
            hidden = (first + last) * (groups - 1) / groups
            times[which] = max(times[which], hidden) + (first + last) / groups
        load = loads.get(rank // heads, np.max(list(loads.values()), axis=0)) + of_exchange
        total, wait = np.cumsum(times + load), np.cumsum(times - busy)
        waits, slowest = np.where(total > slowest, wait, waits), np.maximum(total, slowest)
    flops = np.cumsum([exact.forward_flops.sum(), exact.backward_flops.sum()]) * heads
    share = flops / rates.flops / plan.cp / slowest
    carried = keys[2:].sum(-1) + exchange[0][2:] + exchange[1][2:]
    (forward, both), (exposed, exposed_both), (of_forward, of_both) = (pair.tolist() for pair in (slowest, waits, share))
    return Prediction(forward, both, exposed, exposed_both, of_forward, of_both, int(carried.max()))


def _in_blocks(costs: Cost, ring: PlanTables, report: Report, block: int) -> Cost:
    """The costs with the FLOPs of a kernel that computes whole blocks at the edges of the mask."""
    ratio = blocked_pairs(ring, block, padded=False) / np.maximum(report.work, 1)
    return replace(costs, forward_flops=costs.forward_flops * ratio, backward_flops=costs.backward_flops * ratio)


def _hop_times(costs: Cost, member: int, links: Links, keys: Ints, gradients: Ints) -> tuple[Floats, Floats]:
    """Seconds of a rank in forward and in backward: what it computes, and with what it waits for, [2] each."""
    moved = (keys.sum(0) + gradients.sum(0)) > 0
    live = np.flatnonzero((costs.forward_flops[member] > 0) | moved)
    live = np.union1d([0], live)
    nothing = np.zeros((4, 1), np.int64)
    keys, gradients = keys[:, live[1:]], gradients[:, live[1:]]
    forward, backward = (flops[member][live] / links.rates.flops for flops in work_of_hops(costs))
    # In backward, half of hop 0 comes first and half of it last.
    halves = np.concatenate([backward[:1] / 2, backward[1:], backward[:1] / 2])
    arriving = np.concatenate([keys, nothing], axis=1)
    both_ways = np.concatenate([keys, nothing, nothing], axis=1) + np.concatenate([nothing, nothing, gradients], axis=1)
    times = [np.maximum(x, links.seconds(y)).sum() for x, y in ((forward, arriving), (halves, both_ways))]
    return np.array([forward.sum(), halves.sum()]), np.array(times)


def _ring_amounts(links: Links, table: Transfers, bytes_per_token: list[int]) -> Ints:
    """Bytes of each rank and hop of the ring, where place p of each member sends `bytes_per_token[p]`: [4, ranks, hops]."""
    heads = len(bytes_per_token)
    hops = links.ranks // heads
    parts = [
        (table.sender * heads + place, table.receiver * heads + place, table.tokens * size, table.hop)
        for place, size in enumerate(bytes_per_token)
    ]
    sender, receiver, size, hop = (np.concatenate(column) for column in zip(*parts, strict=True))
    return links.amounts(sender, receiver, size, hop, hops)


def _exchange_amounts(plan: Plan, links: Links, sizes: AttentionSizes) -> Ints:
    """Bytes of the exchange of heads before and after attention in forward, then in backward: [4, 4, ranks].

    In backward the gradients of outputs come first, and the keys again where ranks share key/value heads. Gradients travel
    in the dtype of the inputs.
    """
    split = split_heads(sizes.heads, sizes.kv_heads, plan.ulysses)
    sender, receiver, tokens, queries, keys = np.array(list(exchanged(plan.layout, split)), np.int64).reshape(-1, 5).T
    of_query, of_out = (width // sizes.heads * sizes.element for width in (sizes.query_width, sizes.out_width))
    of_key = sizes.key_width // sizes.kv_heads * sizes.element
    inputs, outputs = tokens * (queries * of_query + keys * of_key), tokens * queries * of_out
    again = outputs if split.even else outputs + tokens * keys * of_key
    there, back = (sender, receiver), (receiver, sender)
    passes: Iterable[tuple[tuple[Ints, Ints], Ints]] = ((there, inputs), (back, outputs), (there, again), (back, inputs))
    return np.stack([links.amounts(*ends, size)[..., 0] for ends, size in passes])


def _overheads(
    plan: Plan, own: AttentionSizes, rates: Rates, groups: int, updates: Mapping[int, RankUpdates] | None
) -> dict[int, Floats]:
    """Seconds of merges, sums and kernel calls of ranks of the ring in forward and in backward, [2] each."""
    if updates is None:
        sample = sorted({0, plan.ring.cp // 2, plan.ring.cp - 1})[:SAMPLED_RANKS]
        updates = {rank: rank_updates(plan.rank_plan(rank * plan.ulysses)) for rank in sample}
    found = {}
    for rank, of_rank in updates.items():
        calls = len(lower(rank_tiles(plan.ring, rank)[0], Capabilities()).tiles) * groups
        found[rank] = np.array(accumulator_bytes(of_rank, own)) / rates.memory + calls * rates.call
    return found
