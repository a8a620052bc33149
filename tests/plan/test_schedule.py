"""Schedules: what they accept, what `auto` chooses, and what hops of several sources save."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_ring.plan import Layout, Mask, Plan, PlanSpec
from cp_ring.plan.report import report
from cp_ring.plan.schedule import (
    LONG,
    SLOT_SHARDS,
    auto,
    check,
    group_sizes,
    parse,
    resolve,
)
from cp_ring.testing.oracle import Case
from tests.rings import assert_right, said, with_backward


@pytest.mark.parametrize("cp", range(1, 10))
def test_named_schedules(cp):
    assert resolve("ring", cp) == tuple(range(cp))
    assert resolve("gather", cp) == (0, *[1] * (cp - 1))
    for schedule in ("ring", "gather", "auto"):
        check(resolve(schedule, cp), cp)


@pytest.mark.parametrize("slot_shards", [1, 2, 4, 7, 64])
def test_auto_is_a_schedule_of_bounded_hops(slot_shards):
    for cp in (1, 2, 3, 5, 8, 9, 16, 64, 200):
        hops = auto(cp, slot_shards)
        check(hops, cp)
        first, *others = group_sizes(hops) or [0]
        assert first == min(2, slot_shards, cp - 1)
        assert (
            all(size == slot_shards for size in others[:-1])
            and max(others, default=0) <= slot_shards
        )
    assert auto(8) == (0, 1, 1, 2, 2, 2, 2, 3)


def test_hops_of_backward_bring_few_tokens():
    for shard, sources in ((LONG // 2, [2, 2, 2, 1]), (LONG, [1] * 7), (2 * LONG, [1] * 7)):
        plan = Plan.build(Mask.full(8 * shard), Layout.zigzag(8 * shard, 8))
        assert plan.schedule == auto(8)
        assert group_sizes(plan.ring.backward.schedule) == sources
    n = 16 * LONG
    few = Mask.full(n // 16), Mask.documents(range(0, n + 1, 1024)), Mask.causal(n, (4096, 0))
    for mask in few:
        assert Plan.build(mask, Layout.zigzag(mask.n, 8)).ring.of_backward is None
    long = Mask.documents([0, n // 2, *range(n // 2 + 1024, n + 1, 1024)])
    plan = Plan.build(long, Layout.zigzag(n, 8))
    assert plan.verify(rank_plans=True).keys_in.max() > 2 * LONG
    assert report(plan.ring.backward).keys_in.max() <= 2 * LONG
    n = 8 * LONG
    mask, layout = Mask.causal(n), Layout.zigzag(n, 8)
    for schedule, stages in (("auto", 9), (auto(8), 5), ("gather", 3)):
        plan = Plan.build(mask, layout, schedule=schedule)
        plan.verify()
        assert len(plan.rank_plan(3).backward) == stages
        for tables in (plan.ring, plan.ring.of_backward or plan.ring):
            alone = Plan.build(mask, layout, schedule=tables.schedule).time()
            of = "there" if tables is plan.ring else "back"
            assert (getattr(plan.time(), of).stages == getattr(alone, of).stages).all()
        alone = PlanSpec(layout, schedule=schedule).build_rank_plan(mask, 8, 3)
        assert repr(alone) == repr(plan.rank_plan(3))


@pytest.mark.parametrize("ulysses", [1, 2])
def test_backward_with_other_hops_than_forward_is_right(ulysses):
    n, cp = 128, 8
    mask, layout = Mask.causal(n), Layout.zigzag(n, cp)
    case = Case.draw(n, h=4, g=2, dtype=torch.float64)
    plan = Plan.build(mask, layout, schedule="gather", ulysses=ulysses)
    back = Plan.build(mask, layout, schedule="ring", ulysses=ulysses)
    back = replace(back, ring=replace(back.ring, layout=plan.ring.layout))
    plan = with_backward(plan, back)
    assert len(plan.rank_plan(3).backward) > 2 + len(plan.rank_plan(3).hops)

    assert_right(plan, case)


@pytest.mark.parametrize(
    "mask, hops",
    [
        (Mask.causal(1 << 16, (1000, 0)), 1),
        (Mask.documents(range(0, (1 << 16) + 1, 1000), n=1 << 16), 1),
        (Mask.batch([Mask.causal(1 << 16)] * 2), 3),
        (Mask.documents([0, 60000, 1 << 16]), 3),
        (Mask.full(1 << 10), 2),  # a hop less is worth more than messages that hide
    ],
)
def test_hops_follow_bytes_and_work(mask, hops):
    """One hop brings few keys; others come in hops of at most so many shards."""
    one = Layout.zigzag(1 << 16, 8)
    layout = Layout.batch([one, one]) if mask.name == "batch" else Layout.zigzag(mask.n, 8)
    plan = Plan.build(mask, layout)
    assert plan.schedule[-1] == hops
    for most in (1, 2, SLOT_SHARDS):
        report = Plan.build(mask, layout, slot_shards=most).verify(rank_plans=True)
        assert report.keys_in.max() <= most * report.tokens_per_rank.max()


@pytest.mark.parametrize(
    "schedule, message",
    [
        ((0, 1, 2, 1), "schedule 0,1,2,1: it decreases from hop 2 to hop 1 at ring distance 3"),
        ((0, 1, 3, 3), "schedule 0,1,3,3: it leaves out hop 2, before ring distance 2"),
        (
            (0, 1, 1),
            "schedule 0,1,1: 3 hops for 4 ranks; it needs the hop of each ring distance, 0 to 3",
        ),
        (
            (0, 0, 1, 2),
            "schedule 0,0,1,2: hop 0 is for a rank's own keys, so ring distance 0 must be at hop "
            "0, and no other",
        ),
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
def test_a_bad_schedule_is_one_line(schedule, message):
    for build in (Plan.build, lambda mask, x, **kw: PlanSpec(x, **kw).build_rank_plan(mask, 4, 0)):
        line = said(build, Mask.causal(64), Layout.zigzag(64, 4), schedule=schedule, slot_shards=2)
        assert line.startswith(message)


def test_schedules_as_text():
    assert parse("auto") == "auto" and parse(" 0,1, 1,2") == (0, 1, 1, 2)
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), schedule="0,1,2,2")
    assert plan.schedule == (0, 1, 2, 2)


def test_a_ring_of_many_members_takes_few_hops_for_short_documents():
    """Where ranks read few keys of others; else the rule, which needs no tiles of other ranks."""
    cp, n = 160, 160 * 64
    mask, owner = Mask.documents([*range(0, n, 40), n]), np.arange(cp) * 7 % cp
    owner[::2] = owner[::2][::-1]
    layout = Layout(n, cp, np.arange(cp + 1) * 64, owner, "dealt")
    plan = Plan.build(mask, layout)
    assert plan.schedule == (0, *[1] * (cp - 1))
    plan.verify()
    alone = PlanSpec(layout).build_rank_plan(mask, cp, 77)
    assert repr(alone.hops) == repr(plan.rank_plan(77).hops)
    assert Plan.build(Mask.causal(n), Layout.zigzag(n, cp)).schedule == auto(cp)
    giant = Mask.documents([0, *range(n - 160 * 20, n, 40), n])
    plan = Plan.build(giant, Layout.zigzag(n, cp))
    assert plan.schedule[-1] < auto(cp)[-1]
    assert report(plan.ring).keys_in.max() <= SLOT_SHARDS * 64
