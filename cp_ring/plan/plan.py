"""Plan: for each rank and hop, the tiles to compute and the token ranges to move, as data.

A member of the ring is one rank, or `ulysses` neighboring ranks, which exchange tokens for heads (see `cp_ring.plan.heads`).
At hop 0 member r computes on its own keys, later on those of one or several other members: on those at distance d (see
`cp_ring.plan.order`) at hop `schedule[d]` (see `cp_ring.plan.schedule`). The plan is three tables over all members: tiles
(which member computes which pairs, on whose keys, at which hop), transfers (which tokens' keys and values move between which
members, at which hop) and gradients (the same for the gradients of keys and values). `plan.rank_plan(rank)` is one rank's
part, which the executor runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.heads import check_exchange, check_members, members_of_node, with_exchange
from cp_ring.plan.layout import Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.order import Order
from cp_ring.plan.ranges import Ints, integer, union
from cp_ring.plan.rank_plan import rank_plan
from cp_ring.plan.routes import DEFAULT, ROUTES
from cp_ring.plan.schedule import Schedule
from cp_ring.plan.tables import Need, PlanTables, RankPlan
from cp_ring.plan.tiles import Tiles, coalesce, split_at_edges
from cp_ring.plan.verify import Report, verify
from cp_ring.plan.verify_ranks import verify_rank_plans


class PlanOptions(TypedDict, total=False):
    """What `Plan.build` takes besides mask and layout."""

    route: str
    schedule: str | Sequence[int]
    slot_shards: int | None
    node_size: int
    ulysses: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all ranks: it can be built, proven, and seen from one rank.

    ring: the tables of the members of the ring; their layout is `layout.merged(ulysses)`.
    layout: which rank holds which tokens, before and after attention.
    ulysses: ranks of a member; with 1, the ranks themselves are the members.
    """

    ring: PlanTables
    layout: Layout
    ulysses: int = 1
    _rank_plans: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        mask: Mask,
        layout: Layout,
        route: str = DEFAULT,
        schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None,
        node_size: int = 1,
        ulysses: int = 1,
    ) -> Plan:
        """The plan of all ranks, not yet proven.

        Args:
            mask: which keys each query sees.
            layout: which rank holds which tokens.
            route: how keys reach the members that need them, a name in `ROUTES`.
            schedule: `auto`, `ring` (one source a hop), `gather` (all remote sources in one hop), or the hop of each ring
                distance, as in (0, 1, 2, 2); see `cp_ring.plan.schedule`.
            slot_shards: the most sources of a hop, so that a receive buffer holds at most so many shards. None is 4 for
                `auto`, and no limit for another schedule. A route with a schedule of its own has no such limit: that of
                `relay` has fewer than `node_size`, but up to 2.
            node_size: neighboring ranks on one node, for routes that are `node_aware`; 1 if nodes do not matter.
            ulysses: neighboring ranks that exchange tokens for heads; the ring has as many times fewer members.

        Raises `PlanError` if mask and layout differ in length, if `ulysses` does not divide the ranks, or if the route or the
        schedule is not right.
        """
        return cls._build(mask, layout, None, route, schedule, slot_shards, node_size, ulysses)

    @classmethod
    def build_rank_plan(cls, mask: Mask, layout: Layout, rank: int, **options: Unpack[PlanOptions]) -> RankPlan:
        """One rank's plan, without planning for the others if the route is `local`. Options and errors as in `build`."""
        check_rank(rank, layout.cp)
        return cls._build(mask, layout, rank, **options).rank_plan(rank)

    @classmethod
    def _build(
        cls, mask: Mask, layout: Layout, rank: int | None, route: str = DEFAULT, schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None, node_size: int = 1, ulysses: int = 1,
    ) -> Plan:  # fmt: skip
        """As `build`; with `rank`, its tables need hold no more than the rank's part."""
        members, near = layout, node_size
        if ulysses != 1:
            members, near = layout.merged(ulysses), members_of_node(node_size, ulysses)
        hops, size = _check(mask, members, route, schedule, slot_shards, near)
        if rank is None or not ROUTES[route].local:
            parts = split_at_edges(mask.pieces, members.edges)
        else:
            mine = members.owner == rank // ulysses
            keep = (mine, ~mine), (~mine, mine), (mine, mine)
            tiles, *chunks = zip(*(split_at_edges(mask.pieces, members.edges, keep=each) for each in keep), strict=True)
            query_chunk, key_chunk = map(np.concatenate, chunks)
            parts = Tiles(np.concatenate([each.data for each in tiles], axis=1)), query_chunk, key_chunk
        return cls(_tables(mask, members, route, hops, parts, size), layout, ulysses)

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
        """The plan of one rank, with keys of tiles counted in the key buffer of their hop; made once.

        Raises `PlanError` if there is no such rank.
        """
        check_rank(rank, self.cp)
        if rank not in self._rank_plans:
            made = rank_plan(self.ring, rank // self.ulysses)
            if self.ulysses > 1:
                made = with_exchange(made, self.layout, self.ring.layout, rank)
            self._rank_plans[rank] = made
        return self._rank_plans[rank]

    def verify(self, num_slots: int = 2, rank_plans: bool = False) -> Report:
        """Proves the plan for all ranks, run with `num_slots` receive buffers; see `cp_ring.plan.verify`.

        The report is that of the members of the ring. Each rank of a member runs the ring for its own heads. `split_heads`
        proves that every head has one rank. So each (query, key, head) that the mask allows is computed exactly once.

        With `rank_plans` it also proves the rank plans that the executor runs, at a higher cost; see
        `cp_ring.plan.verify_ranks`. Raises `PlanError` that names the rank, the hop and the tokens.
        """
        if self.layout is not self.ring.layout:
            check_members(self.layout, self.ring.layout, self.ulysses)
            for rank in range(self.cp):
                check_exchange(self.layout, self.ring.layout, rank, self.rank_plan(rank).exchange if rank_plans else None)
        proven = verify(self.ring, num_slots)
        if rank_plans:
            for place in range(self.ulysses):
                parts = [self.rank_plan(rank) for rank in range(place, self.cp, self.ulysses)]
                verify_rank_plans(self.ring, parts, num_slots)
        return proven


def _check(
    mask: Mask, layout: Layout, route: str, schedule: str | Sequence[int], slot_shards: int | None, node_size: int
) -> tuple[Schedule, int]:
    """Raises `PlanError` if the arguments do not fit together; returns the schedule, and the node size of the order."""
    if mask.n != layout.n:
        raise PlanError(f"the mask is for {mask.n} tokens, the layout for {layout.n}")
    if route not in ROUTES:
        raise PlanError(f"unknown route {route!r}; known are {', '.join(ROUTES)}")
    if integer(node_size, "node_size") < 1 or layout.cp % node_size:
        raise PlanError(f"node_size={node_size}: it must divide the {layout.cp} ranks")
    size = node_size if ROUTES[route].node_aware else 1
    return ROUTES[route].schedule(schedule, layout, slot_shards, size), size


def _tables(
    mask: Mask, layout: Layout, route: str, hops: Schedule, parts: tuple[Tiles, Ints, Ints], node_size: int
) -> PlanTables:  # fmt: skip
    """The tables of the members of the ring, from the pieces of the mask cut at the edges of their chunks."""
    tiles, query_chunk, key_chunk = parts
    edges, starts, cp, order = layout.edges, layout.starts, layout.cp, Order(layout.cp, node_size)
    rank, source = layout.owner[query_chunk], layout.owner[key_chunk]
    tiles = tiles.shifted(starts[query_chunk] - edges[query_chunk], starts[key_chunk] - edges[key_chunk])
    tiles, group = coalesce(tiles, rank * cp + order.distance(rank, source))
    rank, distance = np.divmod(group, cp)
    transfers, gradients = ROUTES[route].transfers(_need(tiles, rank, distance, hops, order), cp)
    transfers = transfers.in_buffer_order("receiver", order)
    gradients = gradients.in_buffer_order("sender", order)
    hop, source = np.array(hops)[distance], order.owner(rank, distance)
    return PlanTables(mask, layout, route, hops, tiles, rank, hop, source, transfers, gradients, node_size)


def _need(tiles: Tiles, rank: Ints, distance: Ints, hops: Schedule, order: Order) -> Need:
    """What each rank reads of the other ranks' keys at each hop."""
    cp, away = len(hops), np.flatnonzero(distance > 0)
    group, start, end = union(rank[away] * cp + distance[away], tiles.k0[away], tiles.k1[away])
    reader, far = np.divmod(group, cp)
    return Need(reader, np.array(hops)[far], order.owner(reader, far), start, end, hops, order)
