"""The one model of time: how long attention takes by a plan, with a kernel, on devices and links of
given rates.

A pass, forward or backward, is a series of stages on each rank: its hops, where backward does half
of hop 0 first and half of it last. A stage lasts as long as the longest of three things: what it
computes, what arrives during it, and what leaves during it (`stage_seconds`).
These are the keys of the next hop, and in backward also the gradients of the last one. A network
card may be shared by several ranks: then what all of them send or receive at a hop goes through it.
Merges, sums and exchanges of heads take time besides, and so do kernel calls, where the blocks of
each are not counted (`Rates.processors`). Where ranks exchange heads, the
exchange of one group of heads hides behind attention on another; that of the first group before
attention and that of the last one after it are exposed.

The schedule `auto`, the choice of a route, `cp-ring plan` with its pictures and comparisons,
`cp-ring tune` and the pictures of traces all read this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.costs.cost import Cost, blocked_pairs, cost, exchanged
from cp_ring.plan.costs.rank_updates import (
    NO_UPDATES,
    RankUpdates,
    accumulator_bytes,
    rank_updates,
)
from cp_ring.plan.lower import ASSUMED, KERNELS, Capabilities
from cp_ring.plan.plan import Plan
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates, stage_seconds
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.tables import PlanTables, Transfers

Floats = NDArray[np.float64]


def sampled_ranks(cp: int) -> list[int]:
    """Ranks whose merges and kernel calls are counted where not all are: the first, one in the
    middle, the last.
    """
    return sorted({0, cp // 2, cp - 1})


@dataclass(frozen=True, eq=False)
class Pass:
    """One direction of attention, in seconds: arrays of ranks [ranks], or of ranks and stages
    [ranks, stages].

    compute: what a stage computes. moving: what arrives or leaves during it, the longer of the two.
    extra: kernel calls,
    merges and sums. hidden, exposed: exchanges of heads that hide behind the stages, and those
    before and after them.
    """

    compute: Floats
    moving: Floats
    extra: Floats | float = 0.0
    hidden: Floats | float = 0.0
    exposed: Floats | float = 0.0

    @cached_property
    def stages(self) -> Floats:
        """How long each stage lasts."""
        return stage_seconds(self.compute, self.moving)

    @property
    def begin(self) -> Floats:
        """When each stage begins, without `extra` and exchanges of heads."""
        return np.cumsum(self.stages, 1) - self.stages

    @property
    def busy(self) -> Floats:
        """The time without that in which ranks wait for messages [ranks]."""
        return self.compute.sum(1) + self.extra

    @property
    def seconds(self) -> Floats:
        """The time of each rank [ranks]."""
        return np.maximum(self.stages.sum(1), self.hidden) + self.exposed + self.extra


@dataclass(frozen=True, eq=False)
class Timeline:
    """The predicted times of one layer's attention, in seconds.

    ideal: those of one kernel call on the whole sequence, divided evenly among ranks: (forward,
    backward). bytes_per_card: keys,
    values and exchanged heads in forward that the busiest network card sends or receives. before:
    the stage of forward in which the keys of each hop travel, int64 [ranks, hops].
    """

    passes: tuple[Pass, Pass]
    ideal: tuple[float, float]
    bytes_per_card: int
    before: Ints

    @cached_property
    def _slowest(self) -> list[tuple[float, float]]:
        """Of forward, and of both together: the time of the slowest rank, and what of it the rank
        waits.
        """
        slowest: list[tuple[float, float]] = []
        total, busy = np.zeros(1), np.zeros(1)
        for one in self.passes:
            total, busy = total + one.seconds, busy + one.busy
            rank = int(np.argmax(total))
            slowest.append((float(total[rank]), float(total[rank] - busy[rank])))
        return slowest

    @property
    def forward(self) -> float:
        """Seconds of forward on the slowest rank."""
        return self._slowest[0][0]

    @property
    def both(self) -> float:
        """Seconds of forward and backward together on the slowest rank."""
        return self._slowest[1][0]

    @property
    def exposed_forward(self) -> float:
        """What of `forward` that rank waits for messages."""
        return self._slowest[0][1]

    @property
    def exposed_both(self) -> float:
        """What of `both` that rank waits for messages."""
        return self._slowest[1][1]

    @property
    def efficiency_forward(self) -> float:
        """Speed of forward relative to one kernel call."""
        return self.ideal[0] / self.forward

    @property
    def efficiency_both(self) -> float:
        """Speed of forward and backward relative to one kernel call each."""
        return sum(self.ideal) / self.both

    def facts(self) -> dict[str, Any]:
        """The times, as JSON has them."""
        times = {
            f"{name}_s": getattr(self, name)
            for name in ("forward", "both", "exposed_forward", "exposed_both")
        }
        speeds = {name: getattr(self, name) for name in ("efficiency_forward", "efficiency_both")}
        return times | speeds | {"bytes_per_card": self.bytes_per_card}


class Links:
    """The links of ranks of which each `ranks_per_node` neighboring ones share a node."""

    def __init__(self, ranks: int, ranks_per_node: int, rates: Rates):
        rank = np.arange(ranks)
        self.ranks, self.rates, self.node = ranks, rates, rank // ranks_per_node
        cards = -(-ranks_per_node // rates.ranks_per_card)
        self.card = self.node * cards + rank % ranks_per_node // rates.ranks_per_card

    def amounts(
        self, sender: Ints, receiver: Ints, size: Ints, hop: Ints | int = 0, hops: int = 1
    ) -> Ints:
        """Bytes of each rank, [4, ranks, hops]: in and out inside its node, in and out through its
        network card.
        """
        crosses = self.node[sender] != self.node[receiver]
        tables = []
        for of_link in (~crosses, crosses):
            for rank in (receiver, sender):
                index = (rank * hops + hop)[of_link]
                tables.append(
                    np.bincount(index, size[of_link], self.ranks * hops).reshape(self.ranks, hops)
                )
        for table in tables[2:]:
            of_card = np.zeros((int(self.card.max()) + 1, hops))
            np.add.at(of_card, self.card, table)
            table[:] = of_card[self.card]
        return np.stack(tables).astype(np.int64)

    def seconds(self, amounts: Ints) -> Floats:
        """Time of amounts, [4, ...]; directions and classes of links are busy at the same time."""
        inside, between = amounts[:2] / self.rates.inside, amounts[2:] / self.rates.between
        return np.maximum(inside.max(0), between.max(0))


def simulate(
    plan: Plan,
    report: Report,
    sizes: AttentionSizes,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
    kernel: Capabilities = KERNELS[ASSUMED],
    updates: Mapping[int, RankUpdates] | None = None,
) -> Timeline:
    """Times of a proven plan for a layer of these sizes, all heads together.

    `ranks_per_node` neighboring ranks share a node. `kernel` says what the kernel can do, from
    which its calls follow. `updates` has those of some ranks of the ring (`rank_updates`); by
    default a few are taken. Those of the others are taken to be as large as the largest of these.
    """
    ring, heads = plan.ring, plan.ulysses
    split, links = (
        split_heads(sizes.heads, sizes.kv_heads, heads),
        Links(plan.cp, ranks_per_node, rates),
    )
    sizes = sizes.exchanging(heads)
    own, groups, hops = (
        sizes.of_rank(heads),
        split.groups if heads > 1 else 1,
        ring.schedule[-1] + 1,
    )
    if updates is None:
        updates = {
            rank: rank_updates(plan.rank_plan(rank * heads), kernel)
            for rank in sampled_ranks(ring.cp)
        }
    exact = costs = cost(report, own)
    if rates.block > 1 and not rates.processors:
        costs = _in_blocks(exact, ring, report, rates)
    widths = zip(
        *(sizes.on_wire(sum(len(x[place]) for x in split.repeated)) for place in range(heads)),
        strict=True,
    )
    tables = zip((ring.transfers, ring.gradients), widths, strict=True)
    keys, gradients = (
        _ring_amounts(links, table, list(bytes_per_token), hops)
        for table, bytes_per_token in tables
    )
    member = np.arange(plan.cp) // heads
    slower = _of_all({rank: x.slower(own, groups, rates) for rank, x in updates.items()}, ring.cp)[
        member
    ]
    compute = [
        x[member, :hops] / rates.flops * slower[:, which, None]
        for which, x in enumerate(_flops(costs))
    ]
    live = (costs.forward_flops[member, :hops] > 0) | ((keys.sum(0) + gradients.sum(0)) > 0)
    before, after = neighbors(live)
    ahead = [_moved(keys, before, hops + more) for more in (0, 1)]
    behind = _moved(gradients, after, hops + 1)
    halves = compute[1][:, :1] / 2
    stages = (
        (compute[0], links.seconds(ahead[0])),
        (np.concatenate([halves, compute[1][:, 1:], halves], 1), links.seconds(ahead[1] + behind)),
    )
    call = 0.0 if rates.processors else groups * rates.call
    extra = _of_all(
        {
            rank: np.array(accumulator_bytes(x, own)) / rates.memory + x.calls * call
            for rank, x in updates.items()
        },
        ring.cp,
    )[member]
    exchange = (
        _exchange_amounts(plan, links, sizes) if heads > 1 else np.zeros((4, 4, plan.cp), np.int64)
    )
    first_there, last_there, first_back, last_back = (
        links.seconds(amounts) for amounts in exchange
    )
    # before and after attention, in each direction
    extra = extra + (2 * groups * rates.call if heads > 1 else 0.0)
    passes = [
        Pass(*stage, extra[:, which], total * (groups - 1) / groups, total / groups)
        for which, (stage, total) in enumerate(
            zip(stages, (first_there + last_there, first_back + last_back), strict=True)
        )
    ]
    one = RankUpdates((), (), {}, grids=([ring.mask.pieces],) * 2)
    ideal = one.slower(own, groups, rates, whole=True) * [
        float(x.sum()) * heads / rates.flops / plan.cp
        for x in (exact.forward_flops, exact.backward_flops)
    ]
    carried = keys[2:].sum(-1) + exchange[0][2:] + exchange[1][2:]
    return Timeline((passes[0], passes[1]), (ideal[0], ideal[1]), int(carried.max()), before)


def _flops(costs: Cost) -> tuple[Floats, Floats]:
    """FLOPs of forward and of backward, rank by hop, decoding included."""
    forward, backward = costs.decode_flops
    return costs.forward_flops + forward, costs.backward_flops + backward


def _in_blocks(costs: Cost, ring: PlanTables, report: Report, rates: Rates) -> Cost:
    """The costs with the FLOPs of a kernel that computes whole blocks at the edges of the mask."""
    ratio = blocked_pairs(ring, rates.block, rates.padded) / np.maximum(report.work, 1)
    return replace(
        costs,
        forward_flops=costs.forward_flops * ratio,
        backward_flops=costs.backward_flops * ratio,
    )


def neighbors(live: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The hops before and after each hop, of those that are live, int64 [ranks, hops]; after the
    last one comes their number.

    live: bool [ranks, hops]; hop 0 counts as live.
    """
    hops = live.shape[1]
    number = np.arange(hops)
    last = np.maximum.accumulate(np.where(live, number, 0), 1)
    following = np.minimum.accumulate(np.where(live, number, hops)[:, ::-1], 1)[:, ::-1]
    return np.pad(last[:, :-1], ((0, 0), (1, 0))), np.pad(
        following[:, 1:], ((0, 0), (0, 1)), constant_values=hops
    )


def _moved(amounts: Ints, stage: Ints, stages: int) -> Ints:
    """Amounts [4, ranks, hops] of the hops after hop 0, counted in the stages in which they travel:
    [4, ranks, stages].
    """
    moved = np.zeros((*amounts.shape[:2], stages), np.int64)
    rank = np.arange(amounts.shape[1])
    for hop in range(1, amounts.shape[2]):
        moved[:, rank, stage[:, hop]] += amounts[:, :, hop]
    return moved


def _ring_amounts(links: Links, table: Transfers, bytes_per_token: list[int], hops: int) -> Ints:
    """Bytes of each rank and hop of the ring, where place p of each member sends
    `bytes_per_token[p]`: [4, ranks, hops].
    """
    heads = len(bytes_per_token)
    parts = [
        (
            table.sender * heads + place,
            table.receiver * heads + place,
            table.tokens * size,
            table.hop,
        )
        for place, size in enumerate(bytes_per_token)
    ]
    sender, receiver, size, hop = (np.concatenate(column) for column in zip(*parts, strict=True))
    return links.amounts(sender, receiver, size, hop, hops)


def _exchange_amounts(plan: Plan, links: Links, sizes: AttentionSizes) -> Ints:
    """Bytes of the exchange of heads before and after attention in forward, then in backward: [4,
    4, ranks].

    In backward the gradients of outputs come first, and the keys again where ranks share key/value
    heads. Gradients travel in the dtype of the inputs.
    """
    split = split_heads(sizes.heads, sizes.kv_heads, plan.ulysses)
    sender, receiver, tokens, queries, keys = (
        np.array(list(exchanged(plan.layout, split)), np.int64).reshape(-1, 5).T
    )
    of_query, of_out = (
        width // sizes.heads * sizes.element for width in (sizes.query_width, sizes.out_width)
    )
    of_key = sizes.key_width // sizes.kv_heads * sizes.element
    inputs, outputs = tokens * (queries * of_query + keys * of_key), tokens * queries * of_out
    again = outputs if split.even else outputs + tokens * keys * of_key
    there, back = (sender, receiver), (receiver, sender)
    passes: Iterable[tuple[tuple[Ints, Ints], Ints]] = (
        (there, inputs),
        (back, outputs),
        (there, again),
        (back, inputs),
    )
    return np.stack([links.amounts(*ends, size)[..., 0] for ends, size in passes])


def _of_all(counted: Mapping[int, Floats], members: int) -> Floats:
    """What was counted of some members of the ring, of all of them: [members, ...]. Others are
    taken to be as the largest of these.
    """
    most = np.max(list(counted.values()), axis=0)
    return np.array([counted.get(rank, most) for rank in range(members)])


# When each stage and each message begins and ends, for pictures


class Span(NamedTuple):
    """A computation or a transfer of a rank at a hop, from `start` to `end` in seconds."""

    rank: int
    hop: int
    start: float
    end: float


def spans(
    plan: PlanTables,
    report: Report,
    sizes: AttentionSizes,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
) -> tuple[list[Span], list[Span]]:
    """The forward pass of a ring: (computations, transfers), without merges and kernel calls.

    The rank of a transfer is its receiver. Its senders' messages follow one another, those inside a
    node beside the others.
    """
    timeline = simulate(
        Plan(plan, plan.layout, plan.key_layout),
        report,
        sizes,
        rates,
        ranks_per_node,
        updates=NO_UPDATES,
    )
    forward, begin = timeline.passes[0], timeline.passes[0].begin
    live = (report.work > 0) | (report.keys_in > 0) | (report.keys_out > 0)
    rank, hop = np.nonzero(live[:, : begin.shape[1]])
    start = begin[rank, hop]
    compute = zip(
        rank.tolist(),
        hop.tolist(),
        start.tolist(),
        (start + forward.compute[rank, hop]).tolist(),
        strict=True,
    )
    table, cp = plan.transfers, plan.cp
    number = (table.receiver * cp + table.hop) * cp + (table.receiver - table.sender) % cp
    number, which = np.unique(number, return_inverse=True)
    size = np.bincount(which, table.tokens * sizes.on_wire()[0])
    (receiver, hop), distance = np.divmod(number // cp, cp), number % cp
    far = (receiver - distance) % cp // ranks_per_node != receiver // ranks_per_node
    seconds = size / np.where(far, rates.between / rates.ranks_per_card, rates.inside)
    first = begin[receiver, timeline.before[receiver, hop]]
    start = in_turn(first, 2 * (receiver * cp + hop) + far, seconds)
    transfers = zip(
        receiver.tolist(), hop.tolist(), start.tolist(), (start + seconds).tolist(), strict=True
    )
    return [Span(*span) for span in compute], [Span(*span) for span in transfers]


def in_turn(first: Floats, link: Ints, seconds: Floats) -> Floats:
    """When messages begin that take so many seconds, where those of one link follow one another
    from `first` on.
    """
    order = np.argsort(link, kind="stable")
    total = np.cumsum(seconds[order]) - seconds[order]
    start = np.empty_like(total)
    begins = np.searchsorted(link[order], link[order])
    start[order] = total - total[begins] if len(total) else total
    return first + start
