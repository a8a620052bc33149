"""The head axis of plans: the exchange of tokens for heads, and which rank computes which heads."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cp_ring.errors import PlanError
from cp_ring.plan import Layout, Mask, Plan, PlanSpec, split_heads
from cp_ring.plan.proof import Axis, check_moves
from cp_ring.plan.sizes.head_split import check_heads


def layouts(n, cp):
    mask = Mask.documents([0, 5, n // 3, n])
    scattered = Layout(
        n, cp, np.arange(n + 1), np.random.default_rng(cp).permutation(np.arange(n) % cp)
    )
    return [Layout.zigzag(n, cp), Layout.contiguous(n, cp), Layout.balanced(mask, cp), scattered,
            Layout.per_document_zigzag([0, 2 * cp, n], cp)]  # fmt: skip


@pytest.mark.parametrize(
    "cp, heads", [(cp, u) for cp in (1, 2, 4, 6, 8, 9) for u in range(2, cp + 1) if cp % u == 0]
)
def test_members_hold_the_tokens_of_their_ranks(cp, heads):
    n = 16 * cp
    for layout in layouts(n, cp):
        plan = Plan.build(Mask.full(n), layout, ulysses=heads)
        plan.verify(rank_plans=True)
        for rank in range(cp):
            exchange = plan.rank_plan(rank).exchange
            member = plan.ring.layout.positions(rank // heads)
            ranges = exchange.receives(0)[rank % heads]
            mine = [member[start:end] for start, end in ranges]
            assert np.concatenate(mine).tolist() == layout.positions(rank).tolist()
            alone = PlanSpec(layout, ulysses=heads).build_rank_plan(plan.mask, cp, rank)
            assert (
                repr(alone) == repr(plan.rank_plan(rank))
                and alone.digest == plan.rank_plan(rank).digest
            )


@pytest.mark.parametrize("column", ["sender", "receiver", "source", "target", "tokens"])
def test_a_spoiled_exchange_is_rejected(column):
    layout = Layout.balanced(Mask.documents([0, 30, 64]), 4)
    merged = layout.merged(2)
    exchange = Plan.build(Mask.full(64), layout, ulysses=2).rank_plan(1).exchange
    axes = Axis(layout), Axis(merged)
    check_moves(exchange, *axes, member=0)
    for place, change in product(range(len(exchange.tokens)), (1, -1)):
        spoiled = getattr(exchange, column).copy()
        spoiled[place] += change
        with pytest.raises(PlanError, match=r"^moves: "):
            check_moves(replace(exchange, **{column: spoiled}), *axes, member=0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8, 12, 24])
def test_every_query_head_meets_its_key_head_once(kv_heads, size):
    """`check_heads` runs for every split; the heads that travel are no more than a rank's query
    heads use.
    """
    if kv_heads % size and size % kv_heads:
        with pytest.raises(PlanError, match=f"heads={size}: it must divide the {kv_heads} key/val"):
            split_heads(24, kv_heads, size)
        return
    split = split_heads(24, kv_heads, size)
    mine = 24 // size
    for place in range(size):
        used = {head * kv_heads // 24 for head in range(place * mine, (place + 1) * mine)}
        sent = {head for group in split.keys for head in range(*group[place])}
        assert sent == used and len(sent) == split.kv_heads_of_rank
    assert split.kv_heads_of_rank * size == kv_heads * split.sharing
    assert split.groups == 1 or split.sharing == 1


@pytest.mark.parametrize(
    "change, says",
    [
        ({"queries": (((0, 3), (2, 4)),)}, "2 key/value heads do not divide 3 query heads"),
        (
            {"queries": (((0, 2), (0, 2)),), "keys": (((0, 2), (0, 2)),)},
            "query head 0 is computed 2 times",
        ),
        (
            {"keys": (((0, 2), (1, 3)),)},
            "rank 1 of a member, group 0: query head 2 uses key/value head 1, not 2",
        ),
    ],
)
def test_a_spoiled_split_is_rejected(change, says):
    split = split_heads(4, 4, 2)
    split = replace(split, queries=(((0, 2), (2, 4)),), keys=(((0, 2), (2, 4)),))
    check_heads(split)
    with pytest.raises(PlanError, match=says):
        check_heads(replace(split, **change))
