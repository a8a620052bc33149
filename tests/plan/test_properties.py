"""Random plans are right, and the proof notices every way to spoil one."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cp_ring.errors import PlanError
from cp_ring.plan import Layout, Mask, Plan, lower
from cp_ring.plan.dense_masks import paint
from cp_ring.plan.lower import BAND, CAUSAL, FULL, REVERSED, call_groups
from cp_ring.plan.proof.verify import verify
from cp_ring.plan.proof.verify_ranks import verify_rank_plans
from cp_ring.plan.shard_tiles import tiles_in_stream
from tests.plan.mutations import PLAN_MUTATIONS, RANK_PLAN_MUTATIONS
from tests.plan.strategies import CAPABILITIES, plans

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def check_plan(plan):
    """The proof accepts the plan, its tiles paint the mask, also after lowering, and a rank plan
    built alone is the same.
    """
    report = plan.verify(rank_plans=True)
    for rank in range(plan.cp):
        plan.verify(executed=plan.rank_plan(rank))
    tiles, _ = tiles_in_stream(plan.ring)
    assert np.array_equal(paint(tiles, plan.n, plan.n), plan.mask.dense())
    assert report.work.sum() == plan.mask.area() == plan.mask.dense().sum()
    apart = plan.ring.tile_rank * plan.ring.cp + plan.ring.tile_source
    for capabilities in CAPABILITIES:
        lowered = lower(plan.ring.tiles, capabilities, apart)
        allowed = {FULL, CAUSAL, REVERSED} | (
            {BAND} if capabilities.bands or capabilities.narrow_bands else set()
        )
        assert set(lowered.kind.tolist()) <= allowed
        for parent in np.unique(lowered.parent):
            mine = lowered.tiles[lowered.parent == parent]
            assert np.array_equal(
                paint(mine, plan.n, plan.n),
                paint(plan.ring.tiles[parent : parent + 1], plan.n, plan.n),
            )
        check_calls(lowered, capabilities.varlen)
    rank = plan.n % plan.cp
    alone = Plan.build_rank_plan(
        plan.mask,
        plan.layout,
        rank,
        route=plan.route,
        schedule=plan.schedule,
    )
    assert repr(alone) == repr(plan.rank_plan(rank))


def check_mutation(plan, pick, seed):
    """One mutation of the tables, or of the rank plans, makes the proof fail."""
    rng = np.random.default_rng(seed)
    if not len(plan.ring.tiles):
        return
    name = [*PLAN_MUTATIONS, *RANK_PLAN_MUTATIONS][
        pick % (len(PLAN_MUTATIONS) + len(RANK_PLAN_MUTATIONS))
    ]
    if name in PLAN_MUTATIONS:
        spoiled = PLAN_MUTATIONS[name](plan, rng)
        if spoiled is not None:
            with pytest.raises(PlanError):
                spoiled.verify()
    else:
        parts = RANK_PLAN_MUTATIONS[name]([plan.rank_plan(rank) for rank in range(plan.cp)], rng)
        if parts is not None:
            with pytest.raises(PlanError):
                verify_rank_plans(plan.ring, parts)
            with pytest.raises(PlanError):
                for part in parts:
                    verify_rank_plans(plan.ring, [part])


def check_calls(lowered, varlen):
    """Every tile is in one call, whose sequences have tiles of one kind and share no token."""
    groups = call_groups(lowered, varlen)
    every = [i for sequences in groups for sequence in sequences for i in sequence]
    assert sorted(every) == list(range(len(lowered.tiles)))
    tiles = list(lowered.tiles)
    for sequences in groups:
        mine = [i for sequence in sequences for i in sequence]
        assert len(set(lowered.kind[mine].tolist())) == 1
        for sequence in sequences:
            assert len({(tiles[i].q0, tiles[i].q1) for i in sequence}) == 1
        queries = [(tiles[i].q0, tiles[i].q1) for i, *_ in sequences]
        keys = sorted((tiles[i].k0, tiles[i].k1) for i in mine)
        for spans in (queries, keys):
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


@settings(max_examples=150, **QUIET)
@given(plan=plans())
def test_random_plans_are_right(plan):
    check_plan(plan)


@settings(max_examples=250, **QUIET)
@given(plan=plans(min_cp=2), pick=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 20))
def test_spoiled_random_plans_are_rejected(plan, pick, seed):
    check_mutation(plan, pick, seed)


def test_a_document_of_thousands_of_chunks_takes_memory_for_its_tiles_alone():
    """Not for its 9 million pairs of chunks: plan and proof of a long document beside short ones."""
    mask = Mask.documents([0, 1000, 5000, 780_000, 786_432], causal=False)
    owner = np.random.default_rng(0).permutation(3072) % 96
    layout = Layout(mask.n, 96, np.arange(0, mask.n + 1, 256), owner, "any")
    tracemalloc.start()
    plan = Plan.build(mask, layout)
    plan.verify()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan.ring.tiles) < 11_000
    assert peak < 64 << 20


@pytest.mark.slow
@settings(max_examples=25_000, **QUIET)
@given(plan=plans())
def test_many_random_plans_are_right(plan):
    check_plan(plan)


@pytest.mark.slow
@settings(max_examples=25_000, **QUIET)
@given(plan=plans(min_cp=2), pick=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 20))
def test_many_spoiled_random_plans_are_rejected(plan, pick, seed):
    check_mutation(plan, pick, seed)


def several_sources(route):
    """Slots of several sources, of each of which several ranges arrive."""
    striped = Layout(96, 6, np.arange(0, 97, 4), np.arange(24) % 6, "striped")
    return Plan.build(Mask.full(96, (6, 6)), striped, route, (0, 1, 1, 2, 2, 2))


@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize("name", PLAN_MUTATIONS)
def test_each_mutation_of_the_tables_is_rejected_by_name(name, route):
    plans = [
        Plan.build(Mask.documents([0, 21, 50, 64]), Layout.zigzag(64, 4), route, "ring"),
        several_sources(route),
    ]
    for seed in range(5):
        spoiled = [PLAN_MUTATIONS[name](plan, np.random.default_rng(seed)) for plan in plans]
        assert spoiled != [None, None]
        for plan in spoiled:
            if plan is not None:
                with pytest.raises(PlanError, match=r"rank \d"):
                    plan.verify()


@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize("name", RANK_PLAN_MUTATIONS)
def test_each_mutation_of_the_rank_plans_is_rejected_by_name(name, route):
    plans = [
        Plan.build(Mask.causal(64), Layout.zigzag(64, 4), route, "ring"),
        Plan.build(Mask.causal(96), Layout.zigzag(96, 6), route, (0, 1, 1, 2, 2, 2)),
        several_sources(route),
    ]
    for seed in range(5):
        found = 0
        for plan in plans:
            parts = RANK_PLAN_MUTATIONS[name](
                [plan.rank_plan(rank) for rank in range(plan.cp)], np.random.default_rng(seed)
            )
            if parts is not None:
                found += 1
                with pytest.raises(PlanError, match=r"rank \d"):
                    verify_rank_plans(plan.ring, parts)
                with pytest.raises(PlanError, match=r"rank \d"):
                    for part in parts:
                        verify_rank_plans(plan.ring, [part])
        assert found


def test_too_few_slots_are_rejected():
    for route in ("direct", "ring"):
        plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), route, "ring")
        assert plan.verify(num_slots=2).slots == 2
        with pytest.raises(
            PlanError, match="rank 0, hop 1: 2 receive buffers in use, num_slots is 1"
        ):
            plan.verify(num_slots=1)


def test_unsorted_tables_are_rejected():
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4))
    back = slice(None, None, -1)
    turned = {
        "tiles": plan.ring.tiles[back],
        "tile_rank": plan.ring.tile_rank[back],
        "tile_hop": plan.ring.tile_hop[back],
    }
    for spoiled, what in (
        (replace(plan.ring, **turned, tile_source=plan.ring.tile_source[back]), "tiles"),
        (replace(plan.ring, transfers=plan.ring.transfers[back]), "transfers"),
        (replace(plan.ring, gradients=plan.ring.gradients[back]), "gradients"),
    ):
        with pytest.raises(PlanError, match=f"{what} are not sorted"):
            verify(spoiled)


def test_a_layout_with_holes_is_rejected():
    plan = Plan.build(Mask.causal(64), Layout.contiguous(64, 4))
    with pytest.raises(PlanError, match="do not go up from 0 to 64"):
        replace(plan, layout=replace(plan.layout, edges=plan.layout.edges[::-1])).verify()
    with pytest.raises(PlanError, match="a chunk of rank 4, but ranks are 0 to 3"):
        replace(plan, layout=replace(plan.layout, owner=plan.layout.owner + 1)).verify()
