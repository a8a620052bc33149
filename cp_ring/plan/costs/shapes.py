"""Shapes of context parallelism side by side: what a `PlanSpec` says beside its layout, which are
route, ranks that exchange heads, and schedule; and the choice of the fastest.

A shape fits into memory if a receive buffer holds at most `slot_shards` times a rank's own keys and
values. This is the bound that schedules keep, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import crossing, memory
from cp_ring.plan.costs.simulate import Timeline, simulate
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.lower import ASSUMED, KERNELS, Capabilities
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.routes import AUTO, DEFAULT, ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates

CHOSEN_BY = 64
"""With more ranks than this, the shape is chosen for so many, with as many tokens each."""


class Assumed(NamedTuple):
    """What predictions assume: a layer, all heads together; rates; neighboring ranks on a node; and
    what the kernel can do.
    """

    sizes: AttentionSizes
    rates: Rates = RATES
    ranks_per_node: int = 1
    kernel: Capabilities = KERNELS[ASSUMED]


class Costed(NamedTuple):
    """What a plan costs in one layer.

    bytes_between_nodes: of all ranks together, in forward: keys and values, and heads that are
    exchanged.
    buffer_bytes: largest sum of a rank's buffers, without what is kept for backward.
    slot_shards: the largest receive buffer, in units of a rank's own keys and values.
    """

    timeline: Timeline
    bytes_between_nodes: int
    buffer_bytes: int
    slot_shards: float


def shapes_of(
    cp: int, sizes: AttentionSizes, asked: PlanSpec, heads: int | str = AUTO
) -> Iterator[PlanSpec]:
    """The shapes that these arguments allow: the route may be `auto`, and `heads`, in place of
    `asked.ulysses`. A route with a schedule of its own has no `slot_shards`.
    """
    counts = (
        [u for u in range(1, cp + 1) if cp % u == 0 and sizes.heads % u == 0]
        if heads == AUTO
        else [int(heads)]
    )
    for u in counts:
        members = cp // u
        nodes = members_of_node(asked.node_size, u)
        for name in ROUTES if asked.route == AUTO else (asked.route,):
            # Where it does the same as direct, or cannot have the schedule, it is none of the
            # choices.
            own = ROUTES[name].own_schedule is not None
            same = own and (nodes in (1, members) or asked.schedule != AUTO)
            if (
                asked.route != AUTO
                or name == DEFAULT
                or not (same or members == 1 or (u > 1 and not own))
            ):
                limit = None if own else asked.slot_shards
                yield replace(asked, route=name, ulysses=u, slot_shards=limit)


def planned(mask: Mask, cp: int, spec: PlanSpec, rates: Rates = RATES) -> Plan:
    """The plan of a shape; not yet proven."""
    return spec.build(mask, cp)


def costed(plan: Plan, report: Report, assumed: Assumed) -> Costed:
    """What a proven plan costs."""
    sizes, rates, ranks_per_node, kernel = assumed
    own = sizes.of_rank(plan.ulysses)
    moved = crossing(plan, sizes, ranks_per_node)
    buffers = {
        name: size for name, size in memory(report, own).items() if not name.startswith("kept")
    }
    shard = int(plan.layout.tokens_per_rank.max()) * sizes.on_wire()[0]
    return Costed(
        simulate(plan, report, sizes, rates, ranks_per_node, kernel),
        moved.keys + moved.exchange,
        sum(buffers.values()),
        int(report.keys_in.max(initial=0)) * own.on_wire()[0] / max(shard, 1),
    )


class Choice(NamedTuple):
    """The shape that was chosen, and why, in one line."""

    shape: PlanSpec
    reason: str


def choose(
    layers: Sequence[tuple[Mask, int]],
    cp: int,
    asked: PlanSpec,
    assumed: Assumed,
    heads: int | str = AUTO,
) -> Choice:
    """The shape of least predicted time, forward and backward, for layers of these masks (mask,
    number of layers), among those of `shapes_of`.

    Of shapes whose predicted times differ by less than a hundredth, the first is chosen: the ring
    alone before heads, `direct` before other routes. Raises `PlanError` where no shape fits into
    memory.
    """
    fits: list[_Timed] = []
    too_large: list[_Timed] = []
    most = asked.slot_shards or SLOT_SHARDS
    asked = replace(asked, slot_shards=most)
    for shape in shapes_of(cp, assumed.sizes, asked, heads):
        seconds, shards = 0.0, 0.0
        for mask, count in layers:
            plan = planned(mask, cp, shape, assumed.rates)
            cost = costed(plan, plan.verify(), assumed)
            seconds, shards = seconds + count * cost.timeline.both, max(shards, cost.slot_shards)
        (fits if shards <= most else too_large).append((shape, seconds, shards))
    if not fits:
        raise PlanError(
            f"slot_shards {most}: no shape fits; {_needs(*too_large[0])}" if too_large else _NONE
        )
    least = min(seconds for _, seconds, _ in fits)
    best = next(cost for cost in fits if cost[1] <= 1.01 * least)
    return Choice(best[0], _reason(best, fits, too_large))


_Timed = tuple[PlanSpec, float, float]
"""A shape, its predicted seconds, and its receive buffer in units of a rank's own keys and values.
"""

_NONE = "no shape of context parallelism is possible with these settings"


def _reason(best: _Timed, fits: list[_Timed], too_large: list[_Timed]) -> str:
    shape, seconds, _ = best
    others = sorted((time, other.name) for other, time, _ in fits if other != shape)
    words = [
        f"route {shape.route}, heads {shape.ulysses}: {1e3 * seconds:.3g} ms predicted for "
        "attention of a step of one sequence"
    ]
    words += [f"{name} {1e3 * time:.3g} ms" for time, name in others[:2]]
    faster = min(
        (timed for timed in too_large if timed[1] < 0.99 * seconds),
        key=lambda timed: timed[1],
        default=None,
    )
    return "; ".join([*words, *([f"{_needs(*faster)}"] if faster else [])])


def _needs(shape: PlanSpec, seconds: float, shards: float) -> str:
    return f"{shape.name} {1e3 * seconds:.3g} ms, but it needs slot_shards {-(-shards // 1):.0f}"
