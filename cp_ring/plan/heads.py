"""Head parallelism: the second axis of context parallelism, around the ring.

`heads` neighboring ranks form a member of the ring. They exchange tokens for heads (an all-to-all): each then holds the tokens
of the whole member, but only its part of the heads. The ring runs over the members, once for each part of the heads; the
outputs go back the same way. Every rank is its own member with `heads=1`, which is the ring alone; all ranks are one member
with `heads=cp`, and there is no ring.

DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509; both at once, Fang and Zhao, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.identity import Part, digest_of_layout
from cp_ring.plan.layout import Layout, check_rank
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, integer
from cp_ring.plan.ring_plan import RingPlan
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
    def build(
        cls,
        mask: Mask,
        layout: Layout,
        heads: int,
        route: str = "direct",
        schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None,
        node_size: int = 1,
    ) -> HeadPlan:
        """The plan of all ranks. `route`, `schedule` and `slot_shards` are those of the ring of `layout.cp / heads` members.

        `node_size` counts ranks. Raises `PlanError` as `RingPlan.build` does, and if `heads` does not divide the ranks.
        """
        merged = layout.merged(heads)
        members = members_of_node(node_size, heads)
        return cls(RingPlan.build(mask, merged, route, schedule, slot_shards, members), layout, heads)

    @classmethod
    def build_rank_plan(
        cls,
        mask: Mask,
        layout: Layout,
        rank: int,
        heads: int,
        route: str = "direct",
        schedule: str | Sequence[int] = "auto",
        slot_shards: int | None = None,
        node_size: int = 1,
    ) -> HeadRankPlan:
        """One rank's plan, without planning for the others where the route allows it; see `RingPlan.build_rank_plan`."""
        merged = layout.merged(heads)
        check_rank(rank, layout.cp)
        members = members_of_node(node_size, heads)
        ring = RingPlan.build_rank_plan(mask, merged, rank // heads, route, schedule, slot_shards, members)
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


def plan_of(
    mask: Mask,
    layout: Layout,
    route: str = "direct",
    schedule: str | Sequence[int] = "auto",
    slot_shards: int | None = None,
    heads: int = 1,
    node_size: int = 1,
) -> RingPlan | HeadPlan:
    """The plan of all ranks: a `HeadPlan`, or the `RingPlan` that it is where each rank is its own member."""
    if heads == 1:
        return RingPlan.build(mask, layout, route, schedule, slot_shards, node_size)
    return HeadPlan.build(mask, layout, heads, route, schedule, slot_shards, node_size)


def rank_plan_of(
    mask: Mask,
    layout: Layout,
    rank: int,
    route: str = "direct",
    schedule: str | Sequence[int] = "auto",
    slot_shards: int | None = None,
    heads: int = 1,
    node_size: int = 1,
) -> RankPlan | HeadRankPlan:
    """As `plan_of`, of one rank, without planning for the others where the route allows it."""
    if heads == 1:
        return RingPlan.build_rank_plan(mask, layout, rank, route, schedule, slot_shards, node_size)
    return HeadPlan.build_rank_plan(mask, layout, rank, heads, route, schedule, slot_shards, node_size)


def members_of_node(node_size: int, heads: int) -> int:
    """Members of the ring on one node of `node_size` ranks: 1 if a node does not hold whole members, or has one."""
    return node_size // heads if integer(node_size, "node_size") > 0 and node_size % heads == 0 else 1


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


MAX_GROUPS = 3
"""The exchange of one group of a rank's heads travels while another group is computed: at most so many groups."""


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank of a member computes, in which group: indexed by group and by the rank's place in the member.

    queries: query heads `[start, end)`.
    keys: key/value heads `[start, end)` that these query heads use; heads of several ranks may overlap.
    repeated: for each key/value head that the kernel gets, which of `keys` it is, counted from their start. Kernels share
        each key/value head among equally many query heads, so where a rank's query heads use some heads more than others,
        these are repeated.
    """

    heads: int
    kv_heads: int
    size: int
    queries: tuple[tuple[Span, ...], ...]
    keys: tuple[tuple[Span, ...], ...]
    repeated: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def groups(self) -> int:
        return len(self.queries)

    @property
    def even(self) -> bool:
        """Whether every key/value head goes to one rank, so that ranks together hold no more keys than before."""
        return self.kv_heads % self.size == 0

    @property
    def kv_heads_of_rank(self) -> int:
        """Key/value heads that a rank computes with, in all its groups, repeated ones included; on the rank with most."""
        return max(sum(len(group[place]) for group in self.repeated) for place in range(self.size))


@lru_cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, size: int) -> HeadSplit:
    """`heads` query heads and `kv_heads` key/value heads over the `size` ranks of a member, proven (`check_heads`).

    A rank with several key/value heads of its own gets them in 2 or 3 groups, if these are equal. Ranks that share
    key/value heads get one group: several would send the same keys around the ring again.

    Raises `PlanError` if `size` does not divide the query heads.
    """
    if integer(size, "heads") < 1 or heads % size:
        raise PlanError(f"heads={size}: it must divide the {heads} query heads")
    mine, shared = heads // size, heads // kv_heads
    own_keys = kv_heads // size if kv_heads % size == 0 else 1
    groups = next((count for count in range(2, MAX_GROUPS + 1) if own_keys % count == 0), 1)
    width = mine // groups
    # Query heads that have one key/value head in common everywhere: the kernel's key/value heads are for so many each.
    block = gcd(width, shared)
    queries, keys, repeated = [], [], []
    for group in range(groups):
        first = [place * mine + group * width for place in range(size)]
        used = [[(start + offset) // shared for offset in range(0, width, block)] for start in first]
        queries.append(tuple((start, start + width) for start in first))
        keys.append(tuple((each[0], each[-1] + 1) for each in used))
        repeated.append(tuple(_fewest([head - each[0] for head in each]) for each in used))
    split = HeadSplit(heads, kv_heads, size, tuple(queries), tuple(keys), tuple(repeated))
    check_heads(split)
    return split


def _fewest(used: list[int]) -> tuple[int, ...]:
    """The heads in `used`, one for each block of query heads, with as few repetitions as equal shares allow."""
    runs = [used.count(head) for head in dict.fromkeys(used)]
    step = gcd(*runs)
    return tuple(used[::step])


def check_heads(split: HeadSplit) -> None:
    """Each query head is computed by one rank in one group, with its own key/value head. Raises `PlanError` if not.

    In a kernel call, query head i of H uses key/value head i // (H / G) of G. So for every query head of a rank, this head,
    looked up in `repeated` and counted from the start of `keys`, must be the one that the query head has in the whole layer.
    """
    shared, done = split.heads // split.kv_heads, [0] * split.heads
    for group in range(split.groups):
        for place in range(split.size):
            (start, end), (first, last) = split.queries[group][place], split.keys[group][place]
            local = split.repeated[group][place]
            where = f"rank {place} of a member, group {group}"
            if (end - start) % len(local):
                raise PlanError(f"{where}: {len(local)} key/value heads do not divide {end - start} query heads")
            for head in range(start, end):
                used = first + local[(head - start) // ((end - start) // len(local))]
                if used != head // shared or not first <= used < last:
                    raise PlanError(f"{where}: query head {head} uses key/value head {used}, not {head // shared}")
                done[head] += 1
    for head, times in enumerate(done):
        if times != 1:
            raise PlanError(f"query head {head} is computed {times} times")
