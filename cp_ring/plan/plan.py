"""Plan: for each rank and hop, the tiles to compute and the token ranges to move, as data.

A member of the ring is one rank, or `ulysses` neighboring ranks, which exchange tokens for heads
(see `cp_ring.plan.sizes.head_split`). At hop 0 member r computes on its own keys, later on those of
one or several other members: on those at distance d at hop `schedule[d]` (see
`cp_ring.plan.schedule`). The plan is three tables over all members: tiles (which member computes
which pairs, on whose keys, at which hop), transfers (which tokens' keys and values move between
which members, at which hop) and gradients (the same for the gradients of keys and values).
`plan.rank_plan(rank)` is one rank's part, which the executor runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from cp_ring.errors import PlanError, expect
from cp_ring.plan.layout import LAYOUTS, Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.message_order import message_order
from cp_ring.plan.moves import Moves
from cp_ring.plan.proof import Axis, check_moves, check_order, check_rank_plan, verify
from cp_ring.plan.rank_plan import rank_plan
from cp_ring.plan.records import Fact, PlanTables, RankPlan
from cp_ring.plan.report import Report, report
from cp_ring.plan.routes import DEFAULT, ROUTES, tables_of
from cp_ring.plan.schedule import Schedule, ring_distance, text
from cp_ring.plan.sizes.device_rates import running
from cp_ring.plan.time import AttentionTime, Conditions, Traffic, least
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True)
class PlanSpec:
    """How attention is split over ranks; `cp_ring.plan.plan.plan` makes and proves the plan of a
    mask.

        plan = PlanSpec("balanced", schedule="ring").build(Mask.causal(8192), cp=4)

    layout: which rank holds which tokens, a name in `LAYOUTS` or a `Layout`.
    route, schedule, ulysses, slot_shards: as in `Plan.build`.
    choice: under these conditions the `ulysses` of least predicted time is chosen; of times that
    differ by less than a hundredth, the smallest number.
    """

    layout: Layout | str = "zigzag"
    route: str = DEFAULT
    schedule: str | Sequence[int] = "auto"
    ulysses: int = 1
    slot_shards: int | None = None
    choice: Conditions | None = None

    def layout_of(self, mask: Mask, cp: int) -> Layout:
        """The `Layout` of a mask over `cp` ranks. Raises `PlanError` for an unknown name."""
        layout = self.layout
        if not isinstance(layout, str):
            return expect("layout", layout, Layout, str)
        if layout not in LAYOUTS:
            raise PlanError(f"layout={layout!r}: unknown; known are {', '.join(LAYOUTS)}")
        return LAYOUTS[layout].make(mask, cp)

    def build(self, mask: Mask, cp: int, rank: int | None = None) -> Plan:
        """The plan of `mask` over `cp` ranks, neither proven nor kept. With `rank` it holds what
        this rank's part needs.

        Raises `PlanError` if mask, ranks and spec do not fit together.
        """
        expect("mask", mask, Mask)
        layout = self.layout_of(mask, cp)
        if self.choice is not None:
            spec = replace(self, layout=layout, choice=None)
            ways = [replace(spec, ulysses=heads) for heads in self.choice.heads_to_try(cp)]
            plans = [way.build(mask, cp) for way in ways]
            best = least([plan.time(self.choice).both for plan in plans])
            return plans[best] if rank is None else ways[best].build(mask, cp, rank)
        if self.route not in ROUTES:
            raise PlanError(f"route={self.route!r}: unknown; known are {', '.join(ROUTES)}")
        if layout.cp != cp:
            raise PlanError(f"layout is for {layout.cp} ranks, not for {cp}")
        members = layout if self.ulysses == 1 else layout.merged(self.ulysses)
        if mask.n != layout.n:
            raise PlanError(f"the mask is for {mask.n} tokens, the layout for {layout.n}")
        mine = None if rank is None or not ROUTES[self.route].straight else rank // self.ulysses
        ring = tables_of(
            mask, members, self.route, self.schedule, self.slot_shards, mine, self.ulysses
        )
        return Plan(ring, layout, self.ulysses)

    def build_rank_plan(self, mask: Mask, cp: int, rank: int) -> RankPlan:
        """One rank's proven part of `build`, without planning for other ranks if the route is
        `straight`.

            rank_plan = PlanSpec(layout).build_rank_plan(mask, layout.cp, rank=0)

        Raises `PlanError` as `build` does, and if there is no such rank.
        """
        return self.build(mask, cp, rank).proven_part(rank)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all ranks, which can be built, proven, and seen from one rank.

        plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp))

    ring: the tables of the members of the ring; their layout is `layout.merged(ulysses)`.
    layout: which rank holds which tokens, before and after attention.
    ulysses: the number of ranks of a member; with 1, the ranks themselves are the members.
    """

    ring: PlanTables
    layout: Layout
    ulysses: int = 1
    _rank_plans: dict[int, RankPlan] = field(default_factory=dict, repr=False)
    # ranks whose parts are proven, and None if the tables are
    _proven: set[int | None] = field(default_factory=set, repr=False, init=False)

    @classmethod
    def build(
        cls,
        mask: Mask,
        layout: Layout | str,
        route: str = DEFAULT,
        schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None,
        **more: Any,
    ) -> Plan:
        """The plan of all ranks, not yet proven.

            plan = Plan.build(mask, layout, schedule="ring")

        Args:
            mask: which keys each query sees.
            layout: which rank holds which tokens.
            route: how keys reach the members that need them, a name in `ROUTES`.
            schedule: `auto`, `ring` (one source a hop), `gather` (all remote sources in one hop),
                or the hop of each ring distance, as in (0, 1, 2, 2); see `cp_ring.plan.schedule`.
            slot_shards: the most sources of a hop; with `auto`, the most shards of keys that a hop
                brings. None is 4 for `auto`, and no limit for other schedules.
            more: `ulysses`, the number of neighboring ranks that exchange tokens for heads. The
                ring has as many times fewer members.

        Raises `PlanError` if mask and layout differ in length, if `ulysses` does not divide the
        ranks, or if the route or the schedule is not right.
        """
        spec = PlanSpec(layout, route, schedule, slot_shards=slot_shards, **more)
        return spec.build(mask, expect("layout", layout, Layout).cp)

    def __repr__(self) -> str:
        heads = f", heads={self.ulysses}" * (self.ulysses > 1)
        return f"<Plan of {self.mask!r}, {self.layout!r}, {self.route}, {self.schedule}{heads}>"

    @property
    def mask(self) -> Mask:
        return self.ring.mask

    @property
    def route(self) -> str:
        return self.ring.route

    @property
    def schedule(self) -> Schedule:
        """The hop of each distance between members of the ring."""
        return self.ring.schedule

    @property
    def n(self) -> int:
        return self.layout.n

    @property
    def cp(self) -> int:
        return self.layout.cp

    def rank_plan(self, rank: int) -> RankPlan:
        """The plan of one rank, made once; keys of tiles are counted in the key buffer of their
        hop.

        Raises `PlanError` if there is no such rank.
        """
        if rank not in self._rank_plans:
            check_rank(rank, self.cp)
            own = rank_plan(self.ring, rank // self.ulysses)
            if self.ulysses > 1:
                layout = self.layout
                exchange = Moves.gathered(layout, self.ring.layout, own.rank)
                shards = Fact("shards", layout.digest, repr(layout))
                identity = *own.identity, Fact.of("heads", self.ulysses), shards
                own = replace(own, rank=rank, cp=self.cp, identity=identity, exchange=exchange)
            self._rank_plans[rank] = own
        return self._rank_plans[rank]

    def time(self, given: Conditions | None = None) -> AttentionTime:
        """Return the predicted time of a layer's attention."""
        ring, shards = self.ring, self.ring.layout.tokens_per_rank
        far = ring_distance(ring.tile_rank, ring.tile_source, ring.cp)
        place = ring.tiles, ring.tile_rank, far
        traffic = Traffic(*place, shards, self.ulysses, given or Conditions())
        there, back = (
            traffic.time(of.schedule, (of.transfers, of.gradients)) for of in (ring, ring.backward)
        )
        return replace(there, back=back.back)

    def verify(
        self, num_slots: int = 2, rank_plans: bool = False, executed: RankPlan | None = None
    ) -> Report:
        """Prove the plan for all ranks with `num_slots` receive buffers; see `cp_ring.plan.proof`.

            report = plan.verify(rank_plans=True)

        The report is about the members of the ring. Each rank of a member runs the ring for its own
        heads, and `split_heads` gives every head to one rank. So each (query, key, head) that the
        mask allows is computed exactly once. A plan that was built for one rank is proven for it.

        With `rank_plans` it also proves what the executor runs, at a higher cost. `executed` is the
        plan that one rank runs: each rank can prove its own, at any number of ranks. Raises
        `PlanError` that names the rank, the hop and the tokens.
        """
        layout, members, part = self.layout, self.ring.layout, self.ring.part
        axes = self._axes()
        if layout is not members:
            if layout.merged(self.ulysses).digest != members.digest:
                raise PlanError(
                    f"the ring of the plan has other members than {self.ulysses} neighboring ranks "
                    "of the layout"
                )
            for one in range(members.cp) if part is None else (part,) * (executed is None):
                check_moves(Moves.gathered(layout, members, one), *axes, member=one)
        verify(self.ring, axes[1])
        proven = report(self.ring)
        if proven.slots > num_slots:
            raise PlanError(f"{proven.slots} receive buffers in use, num_slots is {num_slots}")
        self._proven.add(None)
        parts = *map(self.rank_plan, range(self.cp if rank_plans else 0)), executed
        for own in filter(None, parts):
            self._verify_part(own, num_slots, axes)
        return proven

    def _axes(self) -> tuple[Axis, Axis]:
        """The places of the ranks' tokens, and of those of the ring's members."""
        axis = Axis(self.layout)
        return axis, axis if self.layout is self.ring.layout else Axis(self.ring.layout)

    def proven_part(self, rank: int) -> RankPlan:
        """The plan of one rank, proven with the tables that it is made from; each is proven once.

        Raises `PlanError` if there is no such rank, and as `verify` does.
        """
        own = self.rank_plan(rank)
        if rank not in self._proven:
            if None in self._proven:
                self._verify_part(own, 2, self._axes())
            else:
                self.verify(executed=own)
            self._proven.add(rank)
        return own

    def _verify_part(self, part: RankPlan, num_slots: int, axes: tuple[Axis, Axis]) -> None:
        if part.exchange is not None:
            check_moves(part.exchange, *axes, member=part.member)
        check_rank_plan(self.ring, part, axes[1])
        for backward in (False, True):
            check_order(message_order(part, num_slots, backward), part, num_slots, backward)


MAX_PLANS = 64
"""The number of plans that are kept: those that were used last."""

_plans: dict[tuple[object, ...], Plan] = RUNTIME.keep({})
_locks: dict[int, Lock] = RUNTIME.keep({})  # by process: a forked one finds no held lock


def plan(mask: Mask, cp: int, spec: PlanSpec = PlanSpec()) -> Plan:
    """Return the proven plan of `mask` over `cp` ranks; equal arguments return an earlier call's
    plan.

    Raises `PlanError` if the arguments do not fit together.
    """
    expect("mask", mask, Mask)
    expect("layout", expect("spec", spec, PlanSpec).layout, Layout, str)
    # Functions and routes, not their names: a registry may give a name to another one later.
    layout = spec.layout
    split = LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout.digest
    of = mask.digest, cp, split, ROUTES.get(spec.route), running(), spec.route
    key = *of, text(spec.schedule), spec.ulysses, spec.slot_shards, spec.choice
    with _locks.setdefault(os.getpid(), Lock()):
        # Made under the lock: threads that ask for one plan at the same time share it.
        proven = _plans.pop(key, None)
        if proven is None:
            proven = spec.build(mask, cp)
            proven.verify()
        _plans[key] = proven  # behind those that were used before
        while len(_plans) > MAX_PLANS:
            del _plans[next(iter(_plans))]
    return proven
