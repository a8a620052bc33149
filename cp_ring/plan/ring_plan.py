"""RingPlan: for each rank and hop, the tiles to compute and the token ranges to move, as data.

At hop t rank r computes on the keys of one source rank: its own at hop 0, later those of rank (r - t) mod cp. The plan
is three tables over all ranks: tiles (which rank computes which pairs, on whose keys, at which hop), transfers (which
tokens' keys and values move between which ranks, at which hop) and gradients (the same for the gradients of keys and
values). `plan.rank_plan(rank)` is one rank's part, which the executor runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, union
from cp_ring.plan.rank_plan import rank_plan
from cp_ring.plan.routes import LOCAL, ROUTES
from cp_ring.plan.tables import Need, PlanTables, RankPlan
from cp_ring.plan.tiles import Tiles, coalesce, split_at_edges
from cp_ring.plan.verify import Report, verify
from cp_ring.plan.verify_ranks import verify_rank_plans


@dataclass(frozen=True, eq=False)
class RingPlan(PlanTables):
    """The plan of all ranks: `PlanTables` that can be built, proven, and seen from one rank."""

    _rank_plans: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, mask: Mask, layout: Layout, route: str = "direct") -> RingPlan:
        """The plan of all ranks. Raises `PlanError` if mask and layout differ in length, or the route is not in `ROUTES`."""
        _check(mask, layout, route)
        return cls._from_cut(mask, layout, route, split_at_edges(mask.pieces, layout.edges))

    @classmethod
    def build_rank_plan(cls, mask: Mask, layout: Layout, rank: int, route: str = "direct") -> RankPlan:
        """One rank's plan, without planning for the others if the route is in `LOCAL`. Raises as `build` does."""
        _check(mask, layout, route)
        check_rank(rank, layout.cp)
        if route not in LOCAL:
            return cls.build(mask, layout, route).rank_plan(rank)
        mine = layout.owner == rank
        parts = [split_at_edges(mask.pieces, layout.edges, keep=keep) for keep in ((mine, ~mine), (~mine, mine), (mine, mine))]
        tiles = Tiles(np.concatenate([part[0].data for part in parts], axis=1))
        query_chunk, key_chunk = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        return cls._from_cut(mask, layout, route, (tiles, query_chunk, key_chunk)).rank_plan(rank)

    @classmethod
    def _from_cut(cls, mask: Mask, layout: Layout, route: str, parts: tuple[Tiles, Ints, Ints]) -> RingPlan:
        tiles, query_chunk, key_chunk = parts
        edges, starts, cp = layout.edges, layout.starts, layout.cp
        rank, source = layout.owner[query_chunk], layout.owner[key_chunk]
        tiles = tiles.shifted(starts[query_chunk] - edges[query_chunk], starts[key_chunk] - edges[key_chunk])
        tiles, group = coalesce(tiles, rank * cp + (rank - source) % cp)
        rank, hop = np.divmod(group, cp)
        source = (rank - hop) % cp
        transfers, gradients = ROUTES[route](_need(tiles, rank, hop, source, cp), cp)
        transfers = transfers.sorted_by("receiver", "hop", "start")
        gradients = gradients.sorted_by("sender", "hop", "start")
        return cls(mask, layout, route, tiles, rank, hop, source, transfers, gradients)

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


def _check(mask: Mask, layout: Layout, route: str) -> None:
    if mask.n != layout.n:
        raise PlanError(f"the mask is for {mask.n} tokens, the layout for {layout.n}")
    if route not in ROUTES:
        raise PlanError(f"unknown route {route!r}; known are {', '.join(ROUTES)}")


def _need(tiles: Tiles, rank: Ints, hop: Ints, source: Ints, cp: int) -> Need:
    """What each rank reads of the other ranks' keys at each hop."""
    away = np.flatnonzero(hop > 0)
    group, start, end = union(rank[away] * cp + hop[away], tiles.k0[away], tiles.k1[away])
    first = away[np.searchsorted(rank[away] * cp + hop[away], group)]
    return Need(rank[first], hop[first], source[first], start, end)
