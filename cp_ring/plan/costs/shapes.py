"""Shapes of context parallelism side by side: routes, ranks that exchange heads, schedules; and the
choice of the fastest.

A shape fits into memory if a receive buffer holds at most `slot_shards` times a rank's own keys and
values. This is the bound that schedules keep, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import crossing, memory
from cp_ring.plan.costs.simulate import Timeline, simulate
from cp_ring.plan.exchange.members import members_of_node
from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import ASSUMED, KERNELS, Capabilities
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.routes import DEFAULT, ROUTES
from cp_ring.plan.schedule import SLOT_SHARDS, auto, parse
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.verify import Report

AUTO = "auto"
"""The name by which settings ask for the fastest route, or number of ranks that exchange heads."""

CHOSEN_BY = 64
"""With more ranks than this, the shape is chosen for so many, with as many tokens each."""


class Shape(NamedTuple):
    """A route, ranks that exchange heads, and a schedule, by which `Plan.build` makes a plan."""

    route: str
    heads: int
    schedule: str

    @property
    def name(self) -> str:
        """As tables show it: direct, direct ring, heads 4, heads 4 relay."""
        parts = [f"heads {self.heads}"] if self.heads > 1 else []
        parts += [self.route] if self.heads == 1 or self.route != DEFAULT else []
        return " ".join([*parts, *([self.schedule] if self.schedule != AUTO else [])])


class Costed(NamedTuple):
    """What a shape costs in one layer.

    bytes_between_nodes: of all ranks together, in forward: keys and values, and heads that are
    exchanged.
    buffer_bytes: largest sum of a rank's buffers, without what is kept for backward.
    slot_shards: the largest receive buffer, in units of a rank's own keys and values.
    """

    shape: Shape
    schedule: tuple[int, ...]
    timeline: Timeline
    bytes_between_nodes: int
    buffer_bytes: int
    slot_shards: float


def shapes_of(
    cp: int,
    sizes: AttentionSizes,
    node_size: int,
    route: str = AUTO,
    heads: int | str = AUTO,
    schedule: str = AUTO,
) -> Iterator[Shape]:
    """The shapes that these arguments allow, each `auto` or a choice of its own."""
    counts = (
        [u for u in range(1, cp + 1) if cp % u == 0 and sizes.heads % u == 0]
        if heads == AUTO
        else [int(heads)]
    )
    for u in counts:
        members = cp // u
        nodes = members_of_node(node_size, u)
        for name in ROUTES if route == AUTO else (route,):
            # Where it does the same as direct, or cannot have the schedule, it is none of the
            # choices.
            own = ROUTES[name].own_schedule is not None
            same = own and (nodes in (1, members) or schedule != AUTO)
            if (
                route != AUTO
                or name == DEFAULT
                or not (same or members == 1 or (u > 1 and not own))
            ):
                yield Shape(name, u, schedule)


def planned(
    mask: Mask,
    layout: Layout,
    shape: Shape,
    slot_shards: int | None = None,
    node_size: int = 1,
    rates: Rates = RATES,
) -> Plan:
    """The plan of a shape, with the schedule `auto` of these rates."""
    schedule: str | tuple[int, ...] = parse(shape.schedule)
    route = ROUTES[shape.route]
    if schedule == AUTO and not route.own_schedule and not route.one_source:
        near = members_of_node(node_size, shape.heads) if route.node_aware else 1
        tokens = int(layout.merged(shape.heads).tokens_per_rank.max()) // layout.rows
        schedule = auto(layout.cp // shape.heads, tokens, slot_shards or SLOT_SHARDS, near, rates)
    return Plan.build(mask, layout, shape.route, schedule, slot_shards, node_size, shape.heads)


def costed(
    plan: Plan,
    report: Report,
    shape: Shape,
    sizes: AttentionSizes,
    ranks_per_node: int,
    rates: Rates = RATES,
    kernel: Capabilities = KERNELS[ASSUMED],
) -> Costed:
    """What a proven plan costs for a layer of these sizes, all heads together, with
    `ranks_per_node` ranks on a node.
    """
    own = sizes.of_rank(shape.heads)
    moved = crossing(plan, sizes, ranks_per_node)
    buffers = {
        name: size for name, size in memory(report, own).items() if not name.startswith("kept")
    }
    shard = int(plan.layout.tokens_per_rank.max()) * sizes.on_wire()[0]
    return Costed(
        shape,
        plan.schedule,
        simulate(plan, report, sizes, rates, ranks_per_node, kernel),
        moved.keys + moved.exchange,
        sum(buffers.values()),
        int(report.keys_in.max(initial=0)) * own.on_wire()[0] / max(shard, 1),
    )


class Choice(NamedTuple):
    """The shape that was chosen, and why, in one line."""

    shape: Shape
    reason: str


def choose(
    layers: Sequence[tuple[Mask, int]],
    cp: int,
    sizes: AttentionSizes,
    node_size: int = 1,
    *,
    route: str = AUTO,
    heads: int | str = AUTO,
    schedule: str = AUTO,
    slot_shards: int = SLOT_SHARDS,
    layout: Layout | None = None,
    rates: Rates = RATES,
    kernel: Capabilities = KERNELS[ASSUMED],
) -> Choice:
    """The shape of least predicted time, forward and backward, for layers of these masks (mask,
    number of layers).

    The layout is by default the zigzag. Of shapes whose predicted times differ by less than a
    hundredth, the first is chosen: the ring alone before heads, `direct` before other routes.
    Raises `PlanError` where no shape fits into memory.
    """
    fits: list[_Timed] = []
    too_large: list[_Timed] = []
    for shape in shapes_of(cp, sizes, node_size, route, heads, schedule):
        seconds, shards = 0.0, 0.0
        for mask, count in layers:
            plan = planned(
                mask,
                layout or Layout.zigzag(mask.n, cp),
                shape,
                _limit(shape, slot_shards),
                node_size,
                rates,
            )
            cost = costed(plan, plan.verify(), shape, sizes, node_size, rates, kernel)
            seconds, shards = seconds + count * cost.timeline.both, max(shards, cost.slot_shards)
        (fits if shards <= slot_shards else too_large).append((shape, seconds, shards))
    if not fits:
        raise PlanError(
            f"slot_shards {slot_shards}: no shape fits; {_needs(*too_large[0])}"
            if too_large
            else _NONE
        )
    least = min(seconds for _, seconds, _ in fits)
    best = next(cost for cost in fits if cost[1] <= 1.01 * least)
    return Choice(best[0], _reason(best, fits, too_large))


_Timed = tuple[Shape, float, float]
"""A shape, its predicted seconds, and its receive buffer in units of a rank's own keys and values.
"""

_NONE = "no shape of context parallelism is possible with these settings"


def _limit(shape: Shape, slot_shards: int) -> int | None:
    """The bound of the schedule, if the route has none of its own."""
    return None if ROUTES[shape.route].own_schedule else slot_shards


def _reason(best: _Timed, fits: list[_Timed], too_large: list[_Timed]) -> str:
    shape, seconds, _ = best
    others = sorted((time, other.name) for other, time, _ in fits if other != shape)
    words = [
        f"route {shape.route}, heads {shape.heads}: {1e3 * seconds:.3g} ms predicted for attention "
        "of a step of one sequence"
    ]
    words += [f"{name} {1e3 * time:.3g} ms" for time, name in others[:2]]
    faster = min(
        (timed for timed in too_large if timed[1] < 0.99 * seconds),
        key=lambda timed: timed[1],
        default=None,
    )
    return "; ".join([*words, *([f"{_needs(*faster)}"] if faster else [])])


def _needs(shape: Shape, seconds: float, shards: float) -> str:
    return f"{shape.name} {1e3 * seconds:.3g} ms, but it needs slot_shards {-(-shards // 1):.0f}"
