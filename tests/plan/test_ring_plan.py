"""Plans: what travels, how their cost grows, and what they reject."""

import sys
import tracemalloc

import numpy as np
import pytest

from cp_ring.plan import Layout, Mask, Plan, PlanSpec
from tests.rings import said


def effort(make):
    """Calls of functions and peak bytes of arrays and objects that `make` needs; the same on every
    machine.
    """
    make()
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        make()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        make()
        return calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def packed_work(scale):
    """What a rank or a launcher does for `scale` times 256K tokens, 1,024 documents, and 256 ranks
    of one long sequence.
    """
    n = scale << 18
    cuts = np.sort(
        np.random.default_rng(0).choice(np.arange(1, n), scale * 1024 - 1, replace=False)
    )
    mask, layout = Mask.documents([0, *cuts.tolist(), n]), Layout.zigzag(n, 64)
    long, wide = Mask.causal(scale << 22), Layout.zigzag(scale << 22, scale * 256)
    return {
        "build": lambda: Plan.build(mask, layout),
        "verify": lambda: Plan.build(mask, layout).verify(),
        "balanced": lambda: Layout.balanced(mask, 64),
        "one of many ranks": lambda: PlanSpec(wide).build(long, wide.cp, 100).rank_plan(100),
    }


@pytest.mark.parametrize("name", packed_work(1))
def test_cost_of_large_plans_is_linear(name):
    """Four times the work takes as many calls (all loops are in NumPy, but those over pieces of
    ranks, and over the hops of a rank, which are four times as many) and four times the memory, far
    from 16 times.
    """
    (calls, size), (calls_of_four, size_of_four) = (
        effort(packed_work(scale)[name]) for scale in (1, 4)
    )
    growth = 4 if name == "one of many ranks" else 1.5
    assert calls_of_four < growth * calls < growth * (200_000 if name == "balanced" else 15_000)
    assert size_of_four < 7 * size < 150 << 20


def test_the_order_of_the_backward_pass_is_proven_too():
    plan = Plan.build(Mask.documents([0, 100, 200, 777, 1000, 1024]), Layout.zigzag(1024, 4))
    plan.verify(rank_plans=True)
    part = plan.rank_plan(1)
    part.__dict__["backward"] = part.backward[:-1]
    assert "computes other keys than the mask" in said(plan.verify, rank_plans=True)
    part.__dict__["backward"] = (*part.hops, part.hops[0])
    assert "computes other keys than the mask" in said(plan.verify, rank_plans=True)
