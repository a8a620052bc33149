"""Plans: what travels, how fast they are made, the cache, and what they refuse."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from cp_ring.bench import samples
from cp_ring.errors import PlanError
from cp_ring.plan import Layout, Mask, RingPlan

N = 65536


def share(mask: Mask, layout: Layout, route: str = "direct") -> float:
    return RingPlan.build(mask, layout, route).verify().share_of_full_ring


def test_causal_moves_three_quarters() -> None:
    assert share(Mask.causal(N), Layout.zigzag(N, 4)) <= 0.76
    assert share(Mask.full(N), Layout.zigzag(N, 4)) == 1.0


def test_a_window_moves_an_eighth() -> None:
    assert share(Mask.causal(N, (4096, 0)), Layout.zigzag(N, 8)) <= 0.13


@pytest.mark.parametrize("seed", range(20))
def test_documents_move_little(seed: int) -> None:
    mask = Mask.documents(samples.exponential(N, 2000, seed))
    assert share(mask, Layout.zigzag(N, 8)) <= 0.10
    assert share(mask, Layout.balanced(mask, 8)) <= 0.20


def test_ring_forwards_only_what_a_rank_downstream_needs() -> None:
    mask, layout = Mask.causal(N, (4096, 0)), Layout.contiguous(N, 8)
    direct, ring = (RingPlan.build(mask, layout, route).verify() for route in ("direct", "ring"))
    assert ring.keys_in.sum() == direct.keys_in.sum() == 7 * 4096
    assert (ring.keys_in[:, 2:] == 0).all() and ring.keys_in[0].sum() == 0
    # Gradients go home along the ring, so they pass every rank between.
    assert direct.grads_in.sum() == 7 * 4096 and ring.grads_in.sum() == 7 * 7 * 4096


def test_documents_that_end_at_shard_edges_move_nothing() -> None:
    report = RingPlan.build(Mask.documents([0, 16, 32, 48, 64]), Layout.contiguous(64, 4)).verify(rank_plans=True)
    assert report.keys_in.sum() == report.grads_in.sum() == 0 and (report.moving_hops == 0).all()


def test_report_counts_work_and_tokens() -> None:
    report = RingPlan.build(Mask.causal(64), Layout.zigzag(64, 4)).verify()
    assert report.work.sum() == 64 * 65 // 2
    assert report.balance == pytest.approx(1.0)
    assert (report.keys_in.sum(0) == report.keys_out.sum(0)).all() and (report.grads_in == report.keys_out).all()
    assert report.work_per_rank.tolist() == [520] * 4


def test_a_mask_with_nothing_allowed_is_a_plan_with_nothing_to_do() -> None:
    plan = RingPlan.build(Mask.documents([0], n=8), Layout.zigzag(8, 2))
    report = plan.verify(rank_plans=True)
    assert report.work.sum() == 0 and report.balance == 1.0 and len(plan.rank_plan(0).hops) == 0


@pytest.mark.parametrize("route", ["direct", "ring"])
def test_a_row_alone_is_the_row_of_the_whole(route: str) -> None:
    mask = Mask.documents(samples.exponential(4096, 300, 0))
    layout = Layout.balanced(mask, 8)
    plan = RingPlan.build(mask, layout, route)
    for rank in range(8):
        assert repr(RingPlan.build_rank_plan(mask, layout, rank, route)) == repr(plan.rank_plan(rank))


def test_plans_travel_to_other_processes_with_their_rows() -> None:
    plan = RingPlan.build(Mask.causal(64), Layout.zigzag(64, 4))
    assert repr(plan.rank_plan(1)) == repr(pickle.loads(pickle.dumps(plan)).rank_plan(1))


def test_large_plans_are_quick() -> None:
    """Ten times the time that they take on an idle core, so that a busy machine does not fail."""
    n = 1 << 20
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, n), 4095, replace=False))
    mask, layout = Mask.documents([0, *cuts.tolist(), n]), Layout.zigzag(n, 64)
    long, wide = Mask.causal(1 << 24), Layout.zigzag(1 << 24, 1024)
    for make, seconds in (
        (lambda: RingPlan.build(mask, layout), 0.02),
        (lambda: RingPlan.build(mask, layout).verify(), 0.05),
        (lambda: Layout.balanced(mask, 64), 0.3),
        (lambda: RingPlan.build_rank_plan(long, wide, 500), 0.03),
    ):
        make()
        start = time.process_time()
        make()
        assert time.process_time() - start < seconds


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RingPlan.build(Mask.causal(8), Layout.zigzag(16, 2)), "the mask is for 8 tokens, the layout for 16"),
        (lambda: RingPlan.build(Mask.causal(8), Layout.zigzag(8, 2), "magic"), "unknown route 'magic'; known are direct, ring"),
    ],
)
def test_bad_input_is_one_line(make, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_half_of_the_own_keys_work_comes_last_in_backward():
    """While it is done, the last gradients travel; where nothing travels, nothing is cut."""
    plan = RingPlan.build(Mask.causal(8192), Layout.zigzag(8192, 4))
    for rank in range(4):
        row = plan.rank_plan(rank)
        first, *others, last = row.backward
        assert [hop.index for hop in row.backward] == [0, 1, 2, 3, 0]
        assert others == list(row.hops[1:])
        areas = [int(hop.tiles.area().sum()) for hop in (first, last)]
        assert sum(areas) == row.hops[0].tiles.area().sum()
        assert max(areas) < 0.6 * sum(areas)
        assert first.tiles.q1.max() == last.tiles.q0.min() == 1536  # of 2048: about half the area, a multiple of 128
    alone = RingPlan.build(Mask.causal(64), Layout.zigzag(64, 1)).rank_plan(0)
    assert alone.backward is alone.hops
    one_row_each = RingPlan.build(Mask.causal(2), Layout.contiguous(2, 2)).rank_plan(1)
    assert one_row_each.backward is one_row_each.hops


def test_the_order_of_the_backward_pass_is_proven_too():
    plan = RingPlan.build(Mask.documents([0, 100, 200, 777, 1000, 1024]), Layout.zigzag(1024, 4))
    plan.verify(rank_plans=True)
    row = plan.rank_plan(1)
    row.__dict__["backward"] = row.backward[:-1]
    with pytest.raises(PlanError, match="see keys"):
        plan.verify(rank_plans=True)
    row.__dict__["backward"] = (*row.hops, row.hops[0])
    with pytest.raises(PlanError, match="but mask and neighbors leave it"):
        plan.verify(rank_plans=True)
