"""What attention costs a model, for each shape, layout and codec that a context-parallel size allows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

from cp_ring.plan.cost import AttentionSizes, RankUpdates, memory, rank_updates
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.model_sizes import ModelSizes
from cp_ring.plan.plan import Plan
from cp_ring.plan.predict import predict
from cp_ring.plan.rates import Rates
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS, Schedule
from cp_ring.plan.shapes import AUTO, Shape, planned, shapes_of
from cp_ring.plan.verify import Report

LayerMasks = Sequence[tuple[Mask, int]]
"""The masks of a batch row, and the number of layers that have each."""

_LOSSY = ("int8", "fp8")
_NO_MERGES = {0: RankUpdates((), (), {})}


class AttentionCost(NamedTuple):
    """Attention of all layers of a model, for one microbatch, on the slowest rank.

    schedule: the hops, as `auto` chose them. sources: the most sources of a hop. forward, both: seconds; exposed: what of them
    waits for messages. kept: bytes that a layer keeps for backward; kept_results: those of out and lse alone. slots: bytes of
    receive buffers. sums: bytes of the other buffers of one layer, at the time they are most.
    """

    shape: Shape
    wire: str
    layout: str
    schedule: Schedule
    sources: int
    forward: float
    both: float
    exposed_forward: float
    exposed_both: float
    kept: int
    kept_results: int
    slots: int
    sums: int


@dataclass(frozen=True, eq=False)
class ProvenPlan:
    """A plan of `count` layers, for one of the draws."""

    plan: Plan
    report: Report
    count: float

    @cached_property
    def merges(self) -> dict[int, RankUpdates]:
        """Those of rank 0."""
        return {0: rank_updates(self.plan.rank_plan(0))}


KnownPlans = dict[tuple[int, int, str, Shape], list[ProvenPlan]]
"""Plans by context-parallel size, ranks of a node, layout and shape: they are the same for any micro batch."""


class AttentionCosts:
    """The costs for one split of tokens and heads, the least time first; each is found out when it is asked for.

    Of equals the simplest comes first: the ring alone, `direct`, no codec.

    draws: masks of batch rows, over which times are averaged. Ranks of a node are neighbors: tensor-parallel ones first.
    lossy: try the codecs too that cost accuracy. known: plans that were made before, to which new ones are added.
    """

    def __init__(
        self,
        model: ModelSizes,
        draws: Sequence[LayerMasks],
        tp: int,
        cp: int,
        batch: int,
        ranks_per_node: int,
        rates: Rates,
        layouts: Sequence[str] = ("zigzag",),
        lossy: bool = False,
        known: KnownPlans | None = None,
    ):
        self._known = {} if known is None else known
        self._model, self._tp, self._cp, self._batch, self._rates, self._lossy = model, tp, cp, batch, rates, lossy
        self._near = gcd(cp, max(1, ranks_per_node // tp))
        self._found: list[AttentionCost] = []
        self._rest = self._in_order(draws, layouts)

    def __iter__(self) -> Iterator[AttentionCost]:
        yield from self._found
        for cost in self._rest:
            self._found.append(cost)
            yield cost

    def _in_order(self, draws: Sequence[LayerMasks], layouts: Sequence[str]) -> Iterator[AttentionCost]:
        """Bounds first: times without merges and sums, which take long to count. Then the costs whose bounds are least."""
        shapes = [*shapes_of(self._cp, self._model.attention(self._tp, self._batch), self._near)]
        shapes += [Shape("direct", 1, "gather")] if self._cp > SLOT_SHARDS + 1 else []
        waiting: list[tuple[float, int, AttentionCost, list[ProvenPlan] | None]] = []
        for name in layouts:
            self._add_plans(draws, name, shapes)
            for shape in shapes:
                plans = self._known[self._cp, self._near, name, shape]
                for wire in self._wires(shape.heads):
                    bound = self._cost(plans, shape, wire, name, _NO_MERGES)
                    heapq.heappush(waiting, (bound.both, len(waiting), bound, plans))
        number = len(waiting)
        while waiting:
            _, _, cost, left = heapq.heappop(waiting)
            if left is None:
                yield cost
            else:
                exact, number = self._cost(left, cost.shape, cost.wire, cost.layout, None), number + 1
                heapq.heappush(waiting, (exact.both, number, exact, None))

    def _wires(self, heads: int) -> Iterator[str]:
        """The codecs that a shape allows; latents have no heads to exchange."""
        yield "plain"
        if self._cp > heads:
            yield from ("latent",) if self._model.latent is not None and heads == 1 else ()
            yield from _LOSSY if self._lossy else ()

    def _add_plans(self, draws: Sequence[LayerMasks], name: str, shapes: Sequence[Shape]) -> None:
        """Makes and proves the plans of a layout that are not known yet."""
        missing = [shape for shape in shapes if (self._cp, self._near, name, shape) not in self._known]
        split = [(_layout(name, masks, self._cp), masks) for masks in draws] if missing else []
        for shape in missing:
            limit = SLOT_SHARDS if shape.schedule == AUTO and not ROUTES[shape.route].own_schedule else None
            found = self._known[self._cp, self._near, name, shape] = []
            for layout, masks in split:
                for mask, count in masks:
                    plan = planned(mask, layout, shape, limit, self._near, self._rates)
                    found.append(ProvenPlan(plan, plan.verify(), count / len(draws)))

    def _cost(
        self, plans: Sequence[ProvenPlan], shape: Shape, wire: str, layout: str, merges: Mapping[int, RankUpdates] | None
    ) -> AttentionCost:
        """The cost of a shape. merges: those of some ranks, None to count those of rank 0."""
        sizes = self._model.attention(self._tp, self._batch, wire)
        times, buffers = [0.0] * 4, []
        for one in plans:
            made = predict(one.plan, one.report, sizes, self._rates, self._near, merges or one.merges)
            seconds = made.forward, made.both, made.exposed_forward, made.exposed_both
            times = [total + one.count * more for total, more in zip(times, seconds, strict=True)]
            buffers.append(_amounts(one.report, sizes.of_rank(shape.heads)))
        schedule = plans[0].plan.schedule
        sources = max((schedule.count(hop) for hop in set(schedule) - {0}), default=0)
        kept, results, slots, sums = (max(amounts) for amounts in zip(*buffers, strict=True))
        forward, both, exposed, exposed_both = times
        return AttentionCost(
            shape, wire, layout, schedule, sources, forward, both, exposed, exposed_both, kept, results, slots, sums
        )


def _layout(name: str, masks: LayerMasks, cp: int) -> Layout:
    if name == "balanced":
        return Layout.balanced(list(masks), cp)
    return LAYOUTS[name](masks[0][0], cp)


def _amounts(report: Report, sizes: AttentionSizes) -> tuple[int, int, int, int]:
    """Bytes that are kept, of these out and lse, of receive buffers, and of the other buffers at the time they are most."""
    buffers = memory(report, sizes)

    def together(begin: str) -> int:
        return sum(size for name, size in buffers.items() if name.startswith(begin))

    slots = buffers["both: key and value slots"]
    results = int(report.tokens_per_rank.max()) * sizes.out_width * sizes.element + buffers["kept: lse"]
    return together("kept"), results, slots, together("both") - slots + max(together("forward"), together("backward"))
