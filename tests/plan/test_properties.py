"""Random plans are right, and the proof notices every way to spoil one."""

import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cp_ring.plan import Layout, Mask, Plan, PlanSpec, lower
from cp_ring.plan.lower import BAND, CAUSAL, FULL, REVERSED, call_groups
from cp_ring.plan.proof import check_rank_plan, verify
from cp_ring.plan.shard_tiles import tiles_in_stream
from cp_ring.plan.tiles import paint
from tests.plan.mutations import PLAN_MUTATIONS, RANK_PLAN_MUTATIONS
from tests.plan.strategies import CAPABILITIES, SLOTS, plans
from tests.rings import said, with_backward, with_tables

MUTATIONS = [*PLAN_MUTATIONS, *RANK_PLAN_MUTATIONS]
QUIET = {"suppress_health_check": list(HealthCheck)}


def check_plan(plan, slots):
    """The proof accepts the plan with so many slots, its tiles paint the mask, also after lowering,
    and a rank plan built alone is the same.
    """
    report = plan.verify(slots, rank_plans=True)
    tiles, *_ = tiles_in_stream(plan.ring)
    assert np.array_equal(paint(tiles, plan.n, plan.n), plan.mask.dense())
    assert report.work.sum() == plan.mask.area() == plan.mask.dense().sum()
    for capabilities in CAPABILITIES:
        lowered = lower(plan.ring.tiles, capabilities)
        allowed = {FULL, CAUSAL, REVERSED} | ({BAND} if capabilities.bands else set())
        assert set(lowered.kind.tolist()) <= allowed
        for parent in np.unique(lowered.parent):
            mine = lowered.tiles[lowered.parent == parent]
            assert np.array_equal(
                paint(mine, plan.n, plan.n),
                paint(plan.ring.tiles[parent : parent + 1], plan.n, plan.n),
            )
        for hop in (hop for rank in range(plan.cp) for hop in plan.rank_plan(rank).hops):
            check_calls(lower(hop.tiles, capabilities), capabilities.varlen)
    rank = plan.n % plan.cp
    plan.verify(slots, executed=plan.rank_plan(rank))
    spec = PlanSpec(plan.layout, plan.route, plan.schedule, plan.ulysses)
    alone = spec.build_rank_plan(plan.mask, plan.cp, rank)
    assert repr(alone) == repr(plan.rank_plan(rank))


def said_of(name, plan, seed):
    """What the proof says of a plan after the mutation `name`, of all rank plans and of one after
    another; nothing of a plan that it cannot spoil.
    """
    rng = np.random.default_rng(seed)
    if name in PLAN_MUTATIONS:
        spoiled = PLAN_MUTATIONS[name](plan, rng)
        return [said(spoiled.verify)] if spoiled is not None else []
    parts, lines = [plan.rank_plan(rank) for rank in range(plan.cp)], []
    of_backward = [replace(part, hops=part.back, back=None) for part in parts if part.back]
    for backward in (False, True)[: 1 + bool(of_backward)]:
        spoiled = RANK_PLAN_MUTATIONS[name](of_backward if backward else parts, rng)
        if spoiled is not None:
            if backward:
                pairs = zip(parts, spoiled, strict=True)
                spoiled = [replace(part, back=other.hops) for part, other in pairs]
            alone = (said(check_rank_plan, plan.ring, part) for part in spoiled)
            lines.append(next(filter(None, alone), ""))
    return lines


def check_mutation(plan, pick, seed):
    """One mutation of the tables, or of the rank plans, makes the proof fail."""
    if len(plan.ring.tiles):
        assert all(said_of(MUTATIONS[pick % len(MUTATIONS)], plan, seed))


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


def right(cases):
    """The test of so many random plans."""
    return settings(max_examples=cases, **QUIET)(given(plan=plans(), slots=SLOTS)(check_plan))


def spoiled(cases):
    """The test of so many mutations."""
    number = st.integers(0, 1 << 20)
    drawn = given(plan=plans(min_cp=2), pick=number, seed=number)
    return settings(max_examples=cases, **QUIET)(drawn(check_mutation))


test_random_plans_are_right = right(150)
test_spoiled_random_plans_are_rejected = spoiled(250)
test_many_random_plans_are_right = pytest.mark.slow(right(25_000))
test_many_spoiled_random_plans_are_rejected = pytest.mark.slow(spoiled(25_000))


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


def several_sources(route):
    """Slots of several sources, of each of which several ranges arrive."""
    striped = Layout(96, 6, np.arange(0, 97, 4), np.arange(24) % 6, "striped")
    return Plan.build(Mask.full(96, (6, 6)), striped, route, (0, 1, 1, 2, 2, 2))


def other_hops_in_backward(plan, schedule):
    return with_backward(plan, Plan.build(plan.mask, plan.layout, plan.route, schedule))


def test_hops_of_backward_are_proven_too():
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4))
    other = other_hops_in_backward(plan, "ring")
    other.verify(rank_plans=True)
    part, mine = other.rank_plan(1), plan.rank_plan(1)
    assert part.back and not mine.back and part.digest != mine.digest
    assert "its backward has other hops" in said(check_rank_plan, plan.ring, part)
    for name, mutate in PLAN_MUTATIONS.items():
        spoiled = mutate(Plan(other.ring.of_backward, plan.layout), np.random.default_rng(0))
        if spoiled is not None:
            assert said(with_tables(plan, of_backward=spoiled.ring).verify), name
    both = with_tables(plan, of_backward=other.ring.of_backward)  # gradients of forward too
    assert "not all gradients" in said(both.verify)
    full = with_tables(plan, of_backward=Plan.build(Mask.full(64), plan.layout).ring)
    assert "another mask" in said(full.verify)


def test_too_few_slots_are_rejected():
    for route in ("direct", "ring"):
        plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), route, "ring")
        assert plan.verify(num_slots=2).slots == 2
        assert "2 receive buffers in use, num_slots is 1" in said(plan.verify, num_slots=1)


@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_rejected_by_name(name, route):
    plans = [
        Plan.build(Mask.documents([0, 21, 50, 64]), Layout.zigzag(64, 4), route, "ring"),
        Plan.build(Mask.causal(64), Layout.zigzag(64, 4), route, "ring"),
        Plan.build(Mask.causal(96), Layout.zigzag(96, 6), route, (0, 1, 1, 2, 2, 2)),
        several_sources(route),
    ]
    if route == "direct":
        plans.append(other_hops_in_backward(plans[2], (0, 1, 2, 3, 3, 4)))
    for seed in range(3):
        lines = [line for plan in plans for line in said_of(name, plan, seed)]
        assert lines and all(re.search(r"rank \d", line) for line in lines)


def test_unsorted_tables_are_rejected():
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4)).ring
    for columns in (
        ["tiles", "tile_rank", "tile_hop", "tile_source"],
        ["transfers"],
        ["gradients"],
    ):
        turned = {name: getattr(plan, name)[::-1] for name in columns}
        assert f"{columns[0]} are not sorted" in said(verify, replace(plan, **turned))


def test_a_layout_with_holes_is_rejected():
    plan = Plan.build(Mask.causal(64), Layout.contiguous(64, 4))
    layout = plan.layout
    for spoiled, line in (
        (replace(layout, edges=layout.edges[::-1]), "do not go up from 0 to 64"),
        (replace(layout, owner=layout.owner + 1), "a chunk of rank 4, but ranks are 0 to 3"),
    ):
        assert line in said(replace(plan, layout=spoiled).verify)
