"""What attention costs in every shape that one split of tokens and heads allows: what
`cp_ring.plan.costs.search` asks for each combination of sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from cp_ring.plan.costs.cost import amounts
from cp_ring.plan.costs.model_sizes import ModelSizes
from cp_ring.plan.costs.rank_updates import NO_UPDATES, RankUpdates, rank_updates
from cp_ring.plan.costs.shapes import AUTO, planned, shapes_of
from cp_ring.plan.costs.simulate import simulate
from cp_ring.plan.costs.step_costs import AttentionCost
from cp_ring.plan.layout import NamedLayout
from cp_ring.plan.lower import ASSUMED, KERNELS
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.plan.sizes.device_rates import Rates

if TYPE_CHECKING:
    from cp_ring.plan.proof.verify import Report

LayerMasks = Sequence[tuple[Mask, int]]
"""The masks of a batch row, and the number of layers that have each."""

_LOSSY = ("int8", "fp8")


@dataclass(frozen=True, eq=False)
class ProvenPlan:
    """A plan of `count` layers, for one of the draws."""

    plan: Plan
    report: Report
    count: float

    @cached_property
    def merges(self) -> dict[int, RankUpdates]:
        """Number of merges on rank 0."""
        return {0: rank_updates(self.plan.rank_plan(0), KERNELS[ASSUMED])}


KnownPlans = dict[tuple[int, str, PlanSpec], list[ProvenPlan]]
"""Plans by context-parallel size, layout and shape: they are the same for any
micro batch.
"""


@dataclass(eq=False)
class AttentionCosts:
    """The costs for one split of tokens and heads, the least time first; each is found out when it
    is asked for.

    Of equals the simplest comes first: the ring alone, `direct`, no codec.

    draws: masks of batch rows, over which times are averaged. Ranks of a node are neighbors:
    tensor-parallel ones first.
    lossy: try the codecs too that cost accuracy. known: plans that were made before, to which new
    ones are added.
    """

    model: ModelSizes
    draws: Sequence[LayerMasks]
    tp: int
    cp: int
    batch: int
    ranks_per_node: int
    rates: Rates
    layouts: Sequence[str] = ("zigzag",)
    lossy: bool = False
    known: KnownPlans = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._near = gcd(self.cp, max(1, self.ranks_per_node // self.tp))
        self._ready: list[AttentionCost] = []
        self._rest = self._in_order()

    def __iter__(self) -> Iterator[AttentionCost]:
        yield from self._ready
        for cost in self._rest:
            self._ready.append(cost)
            yield cost

    def _in_order(self) -> Iterator[AttentionCost]:
        """Bounds first: times without merges and sums, which take long to count. Then the costs
        whose bounds are least.
        """
        asked = PlanSpec(route=AUTO, node_size=self._near, slot_shards=SLOT_SHARDS)
        shapes = [*shapes_of(self.cp, self.model.attention(self.tp, self.batch), asked)]
        gather = PlanSpec(schedule="gather", node_size=self._near)
        shapes += [gather] if self.cp > SLOT_SHARDS + 1 else []
        waiting: list[tuple[float, int, AttentionCost, list[ProvenPlan] | None]] = []
        for name in self.layouts:
            self._add_plans(name, shapes)
            for shape in shapes:
                plans = self.known[self.cp, name, shape]
                for wire in self._wires(shape.ulysses):
                    bound = self._cost(plans, shape, wire, name, NO_UPDATES)
                    heapq.heappush(waiting, (bound.both, len(waiting), bound, plans))
        number = len(waiting)
        while waiting:
            _, _, cost, left = heapq.heappop(waiting)
            if left is None:
                yield cost
            else:
                exact = self._cost(left, cost.shape, cost.wire, cost.layout, None)
                number = number + 1
                heapq.heappush(waiting, (exact.both, number, exact, None))

    def _wires(self, heads: int) -> Iterator[str]:
        """The codecs that a shape allows; the MLA latent has no head dimension to split."""
        yield "plain"
        if self.cp > heads:
            yield from ("latent",) if self.model.latent is not None and heads == 1 else ()
            yield from _LOSSY if self.lossy else ()

    def _add_plans(self, name: str, shapes: Sequence[PlanSpec]) -> None:
        """Makes and proves the plans of a layout that are not known yet."""
        missing = [shape for shape in shapes if (self.cp, name, shape) not in self.known]
        named = NamedLayout.named(name)
        split = [(named.of_layers(masks, self.cp), masks) for masks in self.draws if missing]
        for shape in missing:
            plans = self.known[self.cp, name, shape] = []
            for layout, masks in split:
                for mask, count in masks:
                    plan = planned(mask, self.cp, replace(shape, layout=layout), self.rates)
                    plans.append(ProvenPlan(plan, plan.verify(), count / len(self.draws)))

    def _cost(
        self,
        plans: Sequence[ProvenPlan],
        shape: PlanSpec,
        wire: str,
        layout: str,
        merges: Mapping[int, RankUpdates] | None,
    ) -> AttentionCost:
        """The cost of a shape. merges: those of some ranks, None to count those of rank 0."""
        sizes = self.model.attention(self.tp, self.batch, wire)
        times, buffers = [0.0] * 4, []
        for one in plans:
            timeline = simulate(
                one.plan, one.report, sizes, self.rates, self._near, updates=merges or one.merges
            )
            seconds = (
                timeline.forward,
                timeline.both,
                timeline.exposed_forward,
                timeline.exposed_both,
            )
            times = [total + one.count * more for total, more in zip(times, seconds, strict=True)]
            buffers.append(amounts(one.report, sizes.of_rank(shape.ulysses)))
        schedule = plans[0].plan.schedule
        sources = max((schedule.count(hop) for hop in set(schedule) - {0}), default=0)
        most = (max(each) for each in zip(*buffers, strict=True))
        forward, both, exposed, exposed_both = times
        seconds = forward, both, exposed, exposed_both
        return AttentionCost(shape, wire, layout, schedule, sources, *seconds, *most)
