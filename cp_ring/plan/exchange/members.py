"""Head parallelism: the second axis of context parallelism, around the ring.

`ulysses` neighboring ranks form a member of the ring. They exchange tokens for heads (an
all-to-all): each then holds the tokens of the whole member, but only its part of the heads. The
ring runs over the members, once for each part of the heads; the outputs go back the same way. Every
rank is its own member with `ulysses=1`, which is the ring alone; all ranks are one member with
`ulysses=cp`, and there is no ring.

DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509; both at once, Fang and Zhao,
https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.proof.verify import check_layout
from cp_ring.plan.ranges import Ints, expand, runs, starts_of
from cp_ring.plan.rank_plan import Part
from cp_ring.plan.tables import Exchange, RankPlan, Span


def with_exchange(of_member: RankPlan, layout: Layout, members: Layout, rank: int) -> RankPlan:
    """The plan of a rank, from that of its member in the ring alone. `layout` is that of the ranks,
    `members` that of the members.
    """
    ulysses = layout.cp // members.cp
    first = rank - rank % ulysses
    ranges = tuple(_places(layout, members, other) for other in range(first, first + ulysses))
    parts = (
        Part("heads", str(ulysses), str(ulysses)),
        Part("shards", layout.digest, repr(layout)),
    )
    return replace(
        of_member,
        rank=rank,
        cp=layout.cp,
        identity=(*of_member.identity, *parts),
        exchange=Exchange(rank - first, ranges),
    )


def check_members(layout: Layout, members: Layout, ulysses: int) -> None:
    """Raises `PlanError` unless `members` is the layout of members of `ulysses` ranks each."""
    check_layout(layout)
    if layout.merged(ulysses).digest != members.digest:
        raise PlanError(
            f"the plan of the ring is not that of members of {ulysses} ranks of the layout"
        )


def _places(layout: Layout, merged: Layout, rank: int) -> tuple[Span, ...]:
    """Ranges of the member's shard that are, end to end, the rank's own shard."""
    chunk = np.flatnonzero(layout.owner == rank)
    start, size = layout.edges[chunk], np.diff(layout.edges)[chunk]
    holder = np.searchsorted(merged.edges, start, "right") - 1
    place = merged.starts[holder] + start - merged.edges[holder]
    end = place + size
    first, last = runs(place[1:] != end[:-1], len(place))
    return tuple(zip(place[first].tolist(), end[last].tolist(), strict=True))


def check_exchange(
    layout: Layout, merged: Layout, rank: int, exchange: Exchange | None = None
) -> None:
    """Each token of the rank's own shard goes to the place in its member's shard that holds the
    same token of the stream.

    Tokens of the stream have one owner (`check_layout`), so no two tokens of a member can share a
    place, and the sizes of both shards are equal: the exchange is one to one. Both shards are cut
    where a chunk of either, or a range, begins. Between two cuts the token of the stream is linear
    in the place, so it is compared at both ends of each strip. `exchange` is that of a rank plan;
    None makes it anew. Raises `PlanError` that names the rank and the tokens.
    """
    member = rank * merged.cp // layout.cp
    places = _places(layout, merged, rank) if exchange is None else exchange.ranges[exchange.place]
    spans = np.array(places, np.int64).reshape(-1, 2)
    size, tokens = np.diff(spans, axis=1)[:, 0], int(layout.tokens_per_rank[rank])
    if (
        int(size.sum()) != tokens
        or (size <= 0).any()
        or (spans < 0).any()
        or (spans > merged.tokens_per_rank[member]).any()
    ):
        raise PlanError(
            f"rank {rank}: {int(size.sum())} tokens are exchanged, but it holds {tokens}"
        )
    own_start = starts_of(size)  # of each range, in the rank's own shard
    own_chunk, own_stream = _chunks(layout, rank)
    chunk, stream = _chunks(merged, member)
    inside = np.searchsorted(chunk, spans[:, 0], "right")
    which, of_member = expand(inside, np.searchsorted(chunk, spans[:, 1], "left") - inside)
    cuts = np.unique(
        np.concatenate(
            [own_start, own_chunk, chunk[of_member] - spans[which, 0] + own_start[which]]
        )
    )
    for token in (cuts, np.append(cuts[1:], tokens)[: len(cuts)] - 1):
        at = np.searchsorted(own_start, token, "right") - 1
        place = spans[at, 0] + token - own_start[at]
        wrong = np.flatnonzero(
            _in_stream(own_chunk, own_stream, token) != _in_stream(chunk, stream, place)
        )
        if len(wrong):
            bad, to = int(token[wrong[0]]), int(place[wrong[0]])
            raise PlanError(
                f"rank {rank}: its token {bad} goes to place {to} of member {member}, which holds "
                "another token"
            )


def _chunks(layout: Layout, rank: int) -> tuple[Ints, Ints]:
    """Of each chunk of a rank: its first token, counted in the rank's shard and in the stream."""
    chunk = np.flatnonzero(layout.owner == rank)
    return layout.starts[chunk], layout.edges[chunk]


def _in_stream(chunk: Ints, stream: Ints, token: Ints) -> Ints:
    at = np.searchsorted(chunk, token, "right") - 1
    return stream[at] + token - chunk[at]
