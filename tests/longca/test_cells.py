"""Some cells of the benchmark: even work, and no plan slower than that of the version before."""

from dataclasses import replace

import numpy as np
import pytest

from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.balance import balance
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.shard_tiles import shard_tiles
from cp_ring.plan.time import Traffic
from tests.longca.masks import KINDS, cells, named
from tests.longca.table import BASELINE, GIVEN, before, bound, row, slower

LEAST = {
    "full 16": 0.99,
    "causal 16": 0.99,
    "causal_document 16 pile 42": 0.93,
    "causal_document 32 prolong512k 42": 0.9,
    "full_document 32 prolong64k 42": 0.95,
    "share_question 32 prolong512k 42": 0.88,
    "share_question 16 pile 2": 0.82,
    "causal_blockwise 8 prolong512k 2": 0.84,
    "causal_blockwise 32 prolong64k 42": 0.88,
    "prefix_lm_causal 16 1": 0.97,
    "prefix_lm_document 32 prolong512k 42": 0.88,
    "sliding_window 32": 0.96,
    "sliding_window_causal 32": 0.95,
    "global_sliding_window 32 42": 0.97,
    "block_causal_document 8 3": 0.95,
    "block_causal_document 16 42": 0.92,
    "causal_document_long 64 pile 42": 0.9,
}
"""The share of the speed of one kernel call, forward and backward, that a plan has at least."""


@pytest.mark.parametrize("name", LEAST)
def test_plans_are_even_and_fast(name):
    one = row(named(name))
    assert one.balance <= 1.05
    assert one.formula[1] >= LEAST[name]
    assert not slower(one, before()[name])


def test_the_baseline_has_every_cell():
    assert list(before()) == [str(cell) for cell in cells()], BASELINE
    assert len(before()) == 500 and {cell.kind for cell in cells()} == set(KINDS)


def test_few_tokens_that_see_all_are_dealt_evenly():
    """Longformer's tokens that see every other: on an even grid a rank had 4.4 times the mean."""
    mask = Mask.with_global(1 << 19, [(0, 128)], (1024, 1024), causal=False)
    layout = Layout.balanced(mask, 64)
    assert balance([(mask, 1)], layout) <= 1.05
    assert set(layout.tokens_per_rank.tolist()) == {8192}


def test_heads_of_a_node_are_for_documents_that_nodes_share():
    """One giant document among short ones: all keys would go to each rank of a node alone."""
    cell = named("causal_document 64 pile 42")
    layout = Layout.balanced(cell.mask(), 64)
    alone, together = (PlanSpec(layout, ulysses=heads).build(cell.mask(), 64) for heads in (1, 8))
    assert together.time(GIVEN).both < alone.time(GIVEN).both


def test_no_plan_of_these_is_near_one_call():
    """Means of the draws whose goal, 0.85, no layout, hops and heads reach."""
    for kind, cp, most in (("causal_blockwise", 64, 0.716), ("global_sliding_window", 16, 0.8501)):
        draws = [bound(cell) for cell in cells() if (cell.kind, cell.cp) == (kind, cp)]
        assert np.mean(draws) < most


def test_backward_keeps_the_hops_of_forward_where_others_take_longer():
    """One hop for all documents; hops of at most a shard would take an eighth longer."""
    mask = named("causal_document 16 prolong512k 1").mask()
    layout = Layout.balanced(mask, 16)
    plan = Plan.build(mask, layout)
    traffic = Traffic(*shard_tiles(mask.pieces, layout), layout.tokens_per_rank, 1, GIVEN)
    (hops,) = traffic.filled(traffic.shard)
    assert traffic.keys.sum(1).max() > traffic.shard and plan.ring.of_backward is None
    time, other = (each.time(GIVEN) for each in (plan, Plan.build(mask, layout, schedule=hops)))
    assert replace(time, back=other.back).both > 1.05 * time.both
