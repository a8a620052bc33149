"""Head parallelism: the second axis of context parallelism, around the ring.

`ulysses` neighboring ranks form a member of the ring. They exchange tokens for heads (an
all-to-all): each then holds the tokens of the whole member, but only its part of the heads. The
ring runs over the members, once for each part of the heads; the outputs go back the same way. With
`ulysses=1` every rank is its own member, and the ring is alone; with `ulysses=cp` all ranks are one
member, and there is no ring.

Sources: DeepSpeed-Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509; both axes at once, Fang
and Zhao, https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

from dataclasses import replace

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.moves import Moves
from cp_ring.plan.proof import Axis, check_moves
from cp_ring.plan.rank_plan import Fact
from cp_ring.plan.records import RankPlan


def with_exchange(of_member: RankPlan, layout: Layout, members: Layout, rank: int) -> RankPlan:
    """Return the plan of a rank, made from the plan of its member in the ring alone. `layout` is
    the layout of the ranks, `members` that of the members.
    """
    heads = str(layout.cp // members.cp)
    return replace(
        of_member,
        rank=rank,
        cp=layout.cp,
        identity=(
            *of_member.identity,
            Fact("heads", heads, heads),
            Fact("shards", layout.digest, repr(layout)),
        ),
        exchange=Moves.gathered(layout, members, of_member.rank),
    )


def check_members(layout: Layout, members: Layout, ulysses: int, part: int | None = None) -> None:
    """Raise `PlanError` unless `members` is the layout of members of `ulysses` ranks each, and each
    token comes to its place in the shard of its member; of all members, or of one.
    """
    Axis(layout)  # which rejects a layout with holes
    if layout.merged(ulysses).digest != members.digest:
        raise PlanError(
            f"the ring of the plan has other members than {ulysses} neighboring ranks of the layout"
        )
    for member in range(members.cp) if part is None else (part,):
        check_moves(Moves.gathered(layout, members, member), layout, members, member=member)
