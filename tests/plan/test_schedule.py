"""Schedules: what they accept, what `auto` chooses, and what hops of several sources save."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cp_ring.errors import PlanError
from cp_ring.plan import Capabilities, Layout, Mask, Plan, lower
from cp_ring.plan.costs.simulate import Pass
from cp_ring.plan.schedule import SLOT_SHARDS, auto, check, group_sizes, parse, resolve
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates


def calls(plan: Plan, rank: int) -> int:
    return sum(len(lower(hop.tiles, Capabilities()).tiles) for hop in plan.rank_plan(rank).hops)


@pytest.mark.parametrize("cp", range(1, 10))
def test_named_schedules(cp: int) -> None:
    assert resolve("ring", cp, 64) == tuple(range(cp))
    assert resolve("gather", cp, 64) == (0, *[1] * (cp - 1))
    for schedule in ("ring", "gather", "auto"):
        check(resolve(schedule, cp, 64), cp)


@pytest.mark.parametrize("tokens", [1, 64, 1024, 8192, 16384, 1 << 20])
@pytest.mark.parametrize("slot_shards", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("node_size", [1, 8])
def test_auto_is_a_schedule_of_bounded_hops(tokens: int, slot_shards: int, node_size: int) -> None:
    most = set()
    for cp in (1, 2, 3, 5, 8, 9, 16, 64, 200):
        hops = auto(cp, tokens, slot_shards, min(node_size, cp))
        check(hops, cp)
        largest = max(group_sizes(hops), default=0)
        assert largest <= slot_shards
        if cp >= max(8, 2 * min(slot_shards, 16)):
            most.add(largest)
    assert len(most) == 1  # so memory is the same for all these cp
    assert auto(8, tokens, 1) == tuple(range(8))


def modeled(sizes: tuple[int, ...], compute: float, shard: float, call: float) -> float:
    """Time of forward and backward with hops of so many sources, one shard of keys or gradients on
    the wire in `shard`.
    """
    there, back = AttentionSizes().pair_flops
    forward = Pass(
        compute * np.array([[1.0, *sizes]]), shard * np.array([[*sizes, 0.0]]), call * len(sizes)
    )
    halves, moved = [0.5, *sizes, 0.5], np.array([*sizes, 0, 0]) + np.array([0, 0, *sizes])
    backward = Pass(
        back / there * compute * np.array([halves]), shard * moved[None], call * len(sizes)
    )
    return float(forward.seconds[0] + backward.seconds[0])


def compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, min(total, most) + 1):
        yield from ((first, *rest) for rest in compositions(total - first, most))


@pytest.mark.parametrize("tokens", [512, 4096, 8192, 12000, 32768])
@pytest.mark.parametrize("link", [1e10, 4e10, 3e11])
def test_auto_is_the_fastest_of_all_schedules(tokens: int, link: float) -> None:
    compute, shard = tokens**2 / 2 * 4 * 32 * 128 / 4e14, tokens * 4096 / link
    call = 2e-5 + tokens * 40960 / 3e12
    chosen = group_sizes(auto(8, tokens, 4, 1, Rates(between=link)))
    times = [modeled(sizes, compute, shard, call) for sizes in compositions(7, 4)]
    assert modeled(tuple(chosen), compute, shard, call) == pytest.approx(min(times), rel=1e-5)


def test_auto_goes_by_the_links() -> None:
    """40 GB/s: 8,192 keys and values of 4 KiB take 0.84 ms, and 8,192 ** 2 / 2 pairs at 4e14 FLOP/s
    take 1.37 ms.
    """
    assert group_sizes(auto(8, 8192)) == [2, 3, 2]  # the last gradients travel during half of hop 0
    assert (
        group_sizes(auto(8, 8192, node_size=8))
        == group_sizes(auto(8, 8192, rates=Rates(between=3e11)))
        == [3, 4]
    )
    # 3 more of the node, and 1 from another node
    assert group_sizes(auto(64, 8192, node_size=8))[:2] == [1, 4]
    assert group_sizes(auto(64, 16384))[0] == 3
    slow = Rates(ranks_per_card=8)
    assert auto(64, 8192, rates=slow) == auto(64, 8192, rates=Rates(between=5e9))


def test_auto_of_a_plan() -> None:
    def schedule(n: int, cp: int, route: str = "direct", **options: int) -> tuple[int, ...]:
        return Plan.build(Mask.causal(n), Layout.zigzag(n, cp), route, **options).schedule

    assert schedule(65536, 8) == auto(8, 8192, SLOT_SHARDS) == (0, 1, 1, 2, 2, 2, 3, 3)
    assert schedule(65536, 8, node_size=4) == auto(8, 8192, node_size=4)
    assert schedule(65536, 8, "ring", node_size=4) == tuple(range(8))
    assert schedule(65536, 8, slot_shards=2) == auto(8, 8192, 2)
    # more sources would send past the next neighbor
    assert schedule(65536, 8, "ring") == tuple(range(8))
    batch = Plan.build(Mask.batch([Mask.causal(64)] * 3), Layout.batch([Layout.zigzag(64, 4)] * 3))
    assert batch.schedule == auto(4, 16)


def test_several_sources_take_few_kernel_calls() -> None:
    for mask, most in ((Mask.causal(65536), 5), (Mask.full(65536), 4)):
        layout = Layout.zigzag(65536, 8)
        plan = Plan.build(mask, layout)
        assert max(calls(plan, rank) for rank in range(8)) == most
        ring = Plan.build(mask, layout, schedule="ring")
        assert min(calls(ring, rank) for rank in range(8)) == 8
        # They move the same bytes.
        assert plan.verify(rank_plans=True).keys_in.sum() == ring.verify().keys_in.sum()


@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(1024),
        Mask.causal(1024, (100, 0)),
        Mask.documents([0, 10, 500, 511, 900, 1024]),
        Mask.full(1024, (40, 9)),
    ],
    ids=["causal", "window", "documents", "two-sided window"],
)
@pytest.mark.parametrize(
    "layout", [Layout.zigzag(1024, 8), Layout.contiguous(1024, 8)], ids=["zigzag", "contiguous"]
)
def test_several_sources_move_the_same_bytes(mask: Mask, layout: Layout) -> None:
    ring = Plan.build(mask, layout, schedule="ring").verify()
    for schedule in ("auto", "gather", (0, 1, 1, 2, 2, 3, 3, 3)):
        report = Plan.build(mask, layout, schedule=schedule).verify(rank_plans=True)
        assert (report.keys_in.sum(1) == ring.keys_in.sum(1)).all() and (
            report.grads_in.sum(1) == ring.grads_in.sum(1)
        ).all()
        if schedule == "auto":
            assert report.keys_in.max() <= SLOT_SHARDS * report.tokens_per_rank.max()


def test_ring_route_forwards_hops_of_several_sources() -> None:
    """The owner sends to one rank a hop at most as often as the first hop has sources; the others
    forward.
    """
    plan = Plan.build(Mask.full(96), Layout.contiguous(96, 6), "ring", (0, 1, 2, 2, 3, 3))
    plan.verify(rank_plans=True)
    keys = plan.ring.transfers
    assert ((keys.sender == keys.owner) == (keys.hop == 1)).all()
    assert np.bincount(keys.hop).tolist() == [0, 6, 12, 12]
    assert (plan.ring.gradients.receiver == plan.ring.gradients.owner).tolist() == (
        plan.ring.gradients.hop == 3
    ).tolist()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((0, 1, 2, 1), "schedule 0,1,2,1: it decreases from hop 2 to hop 1 at ring distance 3"),
        ((0, 1, 3, 3), "schedule 0,1,3,3: it leaves out hop 2, before ring distance 2"),
        ((0, 2, 2, 2), "schedule 0,2,2,2: it leaves out hop 1, before ring distance 1"),
        (
            (0, 1, 1),
            "schedule 0,1,1: 3 hops for 4 ranks; it needs the hop of each ring distance, 0 to 3",
        ),
        (
            (0, 0, 1, 2),
            "schedule 0,0,1,2: hop 0 is for a rank's own keys, so ring distance 0 must be at hop "
            "0, and no other",
        ),
        ((1, 1, 2, 3), "schedule 1,1,2,3: hop 0 is for a rank's own keys"),
        ((), "schedule : 0 hops for 4 ranks"),
        ((0, 1, 1.5, 2), "a hop of schedule 1.5 is not a whole number"),
        (
            "spiral",
            "schedule 'spiral': known are auto, ring, gather, or the hop of each ring distance as "
            "in 0,1,2,2",
        ),
        (
            "0,1,1,1",
            "schedule 0,1,1,1: a hop has 3 sources, but slot_shards is 2: raise slot_shards to 3",
        ),
        (
            "gather",
            "schedule gather: a hop has 3 sources, but slot_shards is 2: raise slot_shards to 3",
        ),
    ],
)
def test_a_bad_schedule_is_one_line(schedule: object, message: str) -> None:
    for build in (Plan.build, lambda *args, **kw: Plan.build_rank_plan(*args, rank=0, **kw)):
        with pytest.raises(PlanError) as caught:
            build(Mask.causal(64), Layout.zigzag(64, 4), schedule=schedule, slot_shards=2)
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_slot_shards_must_be_positive() -> None:
    with pytest.raises(PlanError, match="slot_shards 0: it must be at least 1"):
        Plan.build(Mask.causal(64), Layout.zigzag(64, 4), slot_shards=0)


def test_schedules_as_text() -> None:
    assert parse("auto") == "auto" and parse(" 0,1, 1,2") == (0, 1, 1, 2)
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), schedule="0,1,2,2")
    assert plan.schedule == (0, 1, 2, 2)
