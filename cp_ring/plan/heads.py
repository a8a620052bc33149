"""Head parallelism: the second axis of context parallelism, around the ring.

`heads` neighboring ranks form a member of the ring. They exchange tokens for heads (an all-to-all): each then holds the tokens
of the whole member, but only its part of the heads. The ring runs over the members, once for each part of the heads; the
outputs go back the same way. Every rank is its own member with `heads=1`, which is the ring alone; all ranks are one member
with `heads=cp`, and there is no ring.

DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509; both at once, Fang and Zhao, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.identity import Part, digest_of_layout
from cp_ring.plan.layout import Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, integer
from cp_ring.plan.ring_plan import PlanOptions, RingPlan
from cp_ring.plan.tables import RankPlan
from cp_ring.plan.verify import Report, check_layout

Span = tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """Where the tokens of each rank of a member lie in the member's shard.

    place: which of the member's ranks this rank is, from 0.
    ranges: for each of the member's ranks, ranges `[start, end)` of the member's shard. End to end they are that rank's own
        shard. A member holds its tokens in ascending order, as every rank does.
    """

    place: int
    ranges: tuple[tuple[Span, ...], ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each rank of the member."""
        return tuple(sum(end - start for start, end in spans) for spans in self.ranges)


@dataclass(frozen=True, eq=False)
class HeadRankPlan:
    """One rank's part of a `HeadPlan`: the exchange with its neighbors, and the rank plan of its member in the ring.

    `rank`, `cp`, `num_tokens`, `batch` and `identity` are as in `RankPlan`, of the rank and all ranks, not of the ring.
    """

    rank: int
    cp: int
    num_tokens: int
    ring: RankPlan
    exchange: Exchange
    identity: tuple[tuple[str, str, str], ...] = ()

    @property
    def batch(self) -> int:
        return self.ring.batch

    @property
    def heads(self) -> int:
        return len(self.exchange.ranges)

    @property
    def digest(self) -> str:
        """Of the whole plan: equal on the ranks that run the same one."""
        return ";".join(f"{name}={content}" for name, content, _ in self.identity)


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """A `RingPlan` over members of `heads` neighboring ranks, and the layout of the ranks.

    ring: the plan of the members; its layout is `layout.merged(heads)`.
    layout: which rank holds which tokens, before and after attention.
    """

    ring: RingPlan
    layout: Layout
    heads: int
    _rank_plans: dict[int, HeadRankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, mask: Mask, layout: Layout, heads: int, **options: Unpack[PlanOptions]) -> HeadPlan:
        """The plan of all ranks; `options` are those of the ring of `layout.cp / heads` members, but `node_size` counts ranks.

        Raises `PlanError` as `RingPlan.build` does, and if `heads` does not divide the ranks.
        """
        return cls(RingPlan.build(mask, layout.merged(heads), **_of_members(options, heads)), layout, heads)

    @classmethod
    def build_rank_plan(
        cls, mask: Mask, layout: Layout, rank: int, heads: int, **options: Unpack[PlanOptions]
    ) -> HeadRankPlan:  # fmt: skip
        """One rank's plan, without planning for the others where the route allows it; see `RingPlan.build_rank_plan`."""
        merged = layout.merged(heads)
        check_rank(rank, layout.cp)
        ring = RingPlan.build_rank_plan(mask, merged, rank // heads, **_of_members(options, heads))
        return _of_rank(ring, layout, merged, rank, heads)

    @property
    def mask(self) -> Mask:
        return self.ring.mask

    @property
    def route(self) -> str:
        return self.ring.route

    @property
    def schedule(self) -> tuple[int, ...]:
        return self.ring.schedule

    @property
    def n(self) -> int:
        return self.layout.n

    @property
    def cp(self) -> int:
        return self.layout.cp

    def rank_plan(self, rank: int) -> HeadRankPlan:
        """The plan of one rank; made once. Raises `PlanError` if there is no such rank."""
        check_rank(rank, self.cp)
        if rank not in self._rank_plans:
            member = self.ring.rank_plan(rank // self.heads)
            self._rank_plans[rank] = _of_rank(member, self.layout, self.ring.layout, rank, self.heads)
        return self._rank_plans[rank]

    def verify(self, num_slots: int = 2, rank_plans: bool = False) -> Report:
        """Proves the ring's plan (see `RingPlan.verify`) and the exchange; the report is that of the ring's members.

        Each rank of a member runs the ring for its own heads. `split_heads` proves that every head has one rank. So each
        (query, key, head) that the mask allows is computed exactly once. Raises `PlanError` that names the rank and the tokens.
        """
        check_layout(self.layout)
        merged = self.layout.merged(self.heads)
        if digest_of_layout(merged) != digest_of_layout(self.ring.layout):
            raise PlanError(f"the plan of the ring is not that of members of {self.heads} ranks of the layout")
        for rank in range(self.cp):
            check_exchange(self.layout, merged, rank, self.rank_plan(rank).exchange if rank_plans else None)
        return self.ring.verify(num_slots, rank_plans)


def plan_of(mask: Mask, layout: Layout, heads: int = 1, **options: Unpack[PlanOptions]) -> RingPlan | HeadPlan:
    """The plan of all ranks: a `HeadPlan`, or the `RingPlan` that it is where each rank is its own member."""
    return RingPlan.build(mask, layout, **options) if heads == 1 else HeadPlan.build(mask, layout, heads, **options)


def rank_plan_of(
    mask: Mask, layout: Layout, rank: int, heads: int = 1, **options: Unpack[PlanOptions]
) -> RankPlan | HeadRankPlan:  # fmt: skip
    """As `plan_of`, of one rank, without planning for the others where the route allows it."""
    if heads == 1:
        return RingPlan.build_rank_plan(mask, layout, rank, **options)
    return HeadPlan.build_rank_plan(mask, layout, rank, heads, **options)


def members_of_node(node_size: int, heads: int) -> int:
    """Members of the ring on one node of `node_size` ranks: 1 if a node does not hold whole members, or has one."""
    return node_size // heads if integer(node_size, "node_size") > 0 and node_size % heads == 0 else 1


def _of_members(options: PlanOptions, heads: int) -> PlanOptions:
    """The options of a ring whose members are `heads` ranks each."""
    return options | {"node_size": members_of_node(options.get("node_size", 1), heads)}


def _of_rank(ring: RankPlan, layout: Layout, merged: Layout, rank: int, heads: int) -> HeadRankPlan:
    first = rank - rank % heads
    ranges = tuple(_places(layout, merged, other) for other in range(first, first + heads))
    parts = (*ring.identity, Part("heads", str(heads), str(heads)), Part("shards", digest_of_layout(layout), repr(layout)))
    return HeadRankPlan(rank, layout.cp, int(layout.tokens_per_rank[rank]), ring, Exchange(rank - first, ranges), parts)


def _places(layout: Layout, merged: Layout, rank: int) -> tuple[Span, ...]:
    """Ranges of the member's shard that are, end to end, the rank's own shard."""
    chunk = np.flatnonzero(layout.owner == rank)
    start, size = layout.edges[chunk], np.diff(layout.edges)[chunk]
    holder = np.searchsorted(merged.edges, start, "right") - 1
    place = merged.starts[holder] + start - merged.edges[holder]
    first = np.flatnonzero(np.append(True, place[1:] != (place + size)[:-1])[: len(place)])
    ends = (place + size)[np.append(first[1:], len(place))[: len(first)] - 1]
    return tuple(zip(place[first].tolist(), ends.tolist(), strict=True))


def check_exchange(layout: Layout, merged: Layout, rank: int, exchange: Exchange | None = None) -> None:
    """Each token of the rank's own shard goes to the place in its member's shard that holds the same token of the stream.

    Tokens of the stream have one owner (`check_layout`), so no two tokens of a member can share a place, and the sizes of
    both shards are equal: the exchange is one to one. Both shards are cut where a chunk of either, or a range, begins.
    Between two cuts the token of the stream is linear in the place, so it is compared at both ends of each strip.
    `exchange` is that of a rank plan; None makes it anew. Raises `PlanError` that names the rank and the tokens.
    """
    member = rank * merged.cp // layout.cp
    made = _places(layout, merged, rank) if exchange is None else exchange.ranges[exchange.place]
    spans = np.array(made, np.int64).reshape(-1, 2)
    size, tokens = np.diff(spans, axis=1)[:, 0], int(layout.tokens_per_rank[rank])
    if int(size.sum()) != tokens or (size <= 0).any() or (spans < 0).any() or (spans > merged.tokens_per_rank[member]).any():
        raise PlanError(f"rank {rank}: {int(size.sum())} tokens are exchanged, but it holds {tokens}")
    own_start = np.cumsum(size) - size  # of each range, in the rank's own shard
    own_chunk, own_stream = _chunks(layout, rank)
    chunk, stream = _chunks(merged, member)
    inside = np.searchsorted(chunk, spans[:, 0], "right"), np.searchsorted(chunk, spans[:, 1], "left")
    which = np.repeat(np.arange(len(spans)), inside[1] - inside[0])
    there = np.concatenate([np.arange(a, b) for a, b in zip(*inside, strict=True)]) if len(which) else which
    cuts = np.unique(np.concatenate([own_start, own_chunk, chunk[there] - spans[which, 0] + own_start[which]]))
    for token in (cuts, np.append(cuts[1:], tokens)[: len(cuts)] - 1):
        at = np.searchsorted(own_start, token, "right") - 1
        place = spans[at, 0] + token - own_start[at]
        wrong = np.flatnonzero(_in_stream(own_chunk, own_stream, token) != _in_stream(chunk, stream, place))
        if len(wrong):
            bad, to = int(token[wrong[0]]), int(place[wrong[0]])
            raise PlanError(f"rank {rank}: its token {bad} goes to place {to} of member {member}, which holds another token")


def _chunks(layout: Layout, rank: int) -> tuple[Ints, Ints]:
    """Of each chunk of a rank: its first token, counted in the rank's shard and in the stream."""
    chunk = np.flatnonzero(layout.owner == rank)
    return layout.starts[chunk], layout.edges[chunk]


def _in_stream(chunk: Ints, stream: Ints, token: Ints) -> Ints:
    at = np.searchsorted(chunk, token, "right") - 1
    return stream[at] + token - chunk[at]
