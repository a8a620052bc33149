"""RingPlan: for each rank and hop, the tiles to compute and the token ranges to move, as data.

At hop 0 rank r computes on its own keys, later on those of one or several other ranks: on those at distance d (see
`cp_ring.plan.order`) at hop `schedule[d]` (see `cp_ring.plan.schedule`). The plan is three tables over all ranks: tiles
(which rank computes which pairs, on whose keys, at which hop), transfers (which tokens' keys and values move between which
ranks, at which hop) and gradients (the same for the gradients of keys and values). `plan.rank_plan(rank)` is one rank's
part, which the executor runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypedDict, Unpack

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.order import Order
from cp_ring.plan.ranges import Ints, integer, union
from cp_ring.plan.rank_plan import rank_plan
from cp_ring.plan.routes import LOCAL, NODE_AWARE, ONE_SOURCE, ROUTES
from cp_ring.plan.schedule import Schedule, relay_schedule, resolve
from cp_ring.plan.tables import Need, PlanTables, RankPlan
from cp_ring.plan.tiles import Tiles, coalesce, split_at_edges
from cp_ring.plan.verify import Report, verify
from cp_ring.plan.verify_ranks import verify_rank_plans


class PlanOptions(TypedDict, total=False):
    """What `RingPlan.build` takes besides mask and layout."""

    route: str
    schedule: str | Sequence[int]
    slot_shards: int | None
    node_size: int


@dataclass(frozen=True, eq=False)
class RingPlan(PlanTables):
    """The plan of all ranks: `PlanTables` that can be built, proven, and seen from one rank."""

    heads: ClassVar[int] = 1
    """Ranks that exchange heads: a ring alone is a ring of members of one rank each."""

    _rank_plans: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @property
    def ring(self) -> RingPlan:
        """The plan of the members, which are the ranks."""
        return self

    @classmethod
    def build(
        cls,
        mask: Mask,
        layout: Layout,
        route: str = "direct",
        schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None,
        node_size: int = 1,
    ) -> RingPlan:
        """The plan of all ranks.

        Args:
            mask: which keys each query sees.
            layout: which rank holds which tokens.
            route: how keys reach the ranks that need them, a name in `ROUTES`.
            schedule: `auto`, `ring` (one source a hop), `gather` (all remote sources in one hop), or the hop of each ring
                distance, as in (0, 1, 2, 2); see `cp_ring.plan.schedule`.
            slot_shards: the most sources of a hop, so that a receive buffer holds at most so many shards. None is 4 for
                `auto`, and no limit for another schedule. The route `relay` has a schedule of its own, of fewer than
                `node_size`, but up to 2.
            node_size: neighboring ranks on one node, for routes in `NODE_AWARE`; 1 if nodes do not matter.

        Raises `PlanError` if mask and layout differ in length, or if the route or the schedule is not right.
        """
        hops, size = _check(mask, layout, route, schedule, slot_shards, node_size)
        return cls._from_cut(mask, layout, route, hops, split_at_edges(mask.pieces, layout.edges), size)

    @classmethod
    def build_rank_plan(cls, mask: Mask, layout: Layout, rank: int, **options: Unpack[PlanOptions]) -> RankPlan:
        """One rank's plan, without planning for the others if the route is in `LOCAL`. Options and errors as in `build`."""
        route = options.get("route", "direct")
        hops, size = _check(mask, layout, **options)
        check_rank(rank, layout.cp)
        if route not in LOCAL:
            return cls.build(mask, layout, route, hops, node_size=size).rank_plan(rank)
        mine = layout.owner == rank
        parts = [split_at_edges(mask.pieces, layout.edges, keep=keep) for keep in ((mine, ~mine), (~mine, mine), (mine, mine))]
        tiles = Tiles(np.concatenate([part[0].data for part in parts], axis=1))
        query_chunk, key_chunk = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        return cls._from_cut(mask, layout, route, hops, (tiles, query_chunk, key_chunk), size).rank_plan(rank)

    @classmethod
    def _from_cut(
        cls, mask: Mask, layout: Layout, route: str, hops: Schedule, parts: tuple[Tiles, Ints, Ints], node_size: int
    ) -> RingPlan:
        tiles, query_chunk, key_chunk = parts
        edges, starts, cp, order = layout.edges, layout.starts, layout.cp, Order(layout.cp, node_size)
        rank, source = layout.owner[query_chunk], layout.owner[key_chunk]
        tiles = tiles.shifted(starts[query_chunk] - edges[query_chunk], starts[key_chunk] - edges[key_chunk])
        tiles, group = coalesce(tiles, rank * cp + order.distance(rank, source))
        rank, distance = np.divmod(group, cp)
        transfers, gradients = ROUTES[route](_need(tiles, rank, distance, hops, order), cp)
        transfers = transfers.in_buffer_order("receiver", order)
        gradients = gradients.in_buffer_order("sender", order)
        hop, source = np.array(hops)[distance], order.owner(rank, distance)
        return cls(mask, layout, route, hops, tiles, rank, hop, source, transfers, gradients, node_size)

    def rank_plan(self, rank: int) -> RankPlan:
        """The plan of one rank, with keys of tiles counted in the key buffer of their hop; made once.

        Raises `PlanError` if there is no such rank.
        """
        check_rank(rank, self.cp)
        if rank not in self._rank_plans:
            self._rank_plans[rank] = rank_plan(self, rank)
        return self._rank_plans[rank]

    def verify(self, num_slots: int = 2, rank_plans: bool = False) -> Report:
        """Proves the plan for all ranks, run with `num_slots` receive buffers; see `cp_ring.plan.verify`.

        With `rank_plans` it also proves the rank plans that the executor runs, at a higher cost; see
        `cp_ring.plan.verify_ranks`. Raises `PlanError` that names the rank, the hop and the tokens.
        """
        proven = verify(self, num_slots)
        if rank_plans:
            verify_rank_plans(self, [self.rank_plan(rank) for rank in range(self.cp)], num_slots)
        return proven


def _check(
    mask: Mask,
    layout: Layout,
    route: str = "direct",
    schedule: str | Sequence[int] = "auto",
    slot_shards: int | None = None,
    node_size: int = 1,
) -> tuple[Schedule, int]:
    """Raises `PlanError` if the arguments do not fit together; returns the schedule, and the node size of the order."""
    if mask.n != layout.n:
        raise PlanError(f"the mask is for {mask.n} tokens, the layout for {layout.n}")
    if route not in ROUTES:
        raise PlanError(f"unknown route {route!r}; known are {', '.join(ROUTES)}")
    if integer(node_size, "node_size") < 1 or layout.cp % node_size:
        raise PlanError(f"node_size={node_size}: it must divide the {layout.cp} ranks")
    size = node_size if route in NODE_AWARE else 1
    if route == "relay":
        return relay_schedule(schedule, layout.cp, size), size
    tokens = int(layout.tokens_per_rank.max()) // layout.rows
    return resolve(schedule, layout.cp, tokens, slot_shards, one_source=route in ONE_SOURCE, node_size=size), size


def _need(tiles: Tiles, rank: Ints, distance: Ints, hops: Schedule, order: Order) -> Need:
    """What each rank reads of the other ranks' keys at each hop."""
    cp, away = len(hops), np.flatnonzero(distance > 0)
    group, start, end = union(rank[away] * cp + distance[away], tiles.k0[away], tiles.k1[away])
    reader, far = np.divmod(group, cp)
    return Need(reader, np.array(hops)[far], order.owner(reader, far), start, end, hops, order)
