"""The model of time: everything that predicts a time reads it, and it counts what the kernel can
do.
"""

from __future__ import annotations

import numpy as np
import pytest

from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.costs import splits
from cp_ring.plan.costs.attention_costs import AttentionCosts
from cp_ring.plan.costs.rank_updates import NO_UPDATES, rank_updates
from cp_ring.plan.costs.simulate import Pass, in_turn, neighbors, simulate, spans
from cp_ring.plan.lower import KERNELS
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates
from tests.plan.test_tune import MODEL

SLOW = Rates(between=2e9)
UNEVEN = Plan.build(Mask.documents([0, 3000, 3500, 4096]), Layout.zigzag(4096, 4), schedule="ring")


def test_pictures_of_plans_show_the_predicted_time() -> None:
    report, sizes = UNEVEN.verify(4), AttentionSizes()
    predicted = simulate(UNEVEN, report, sizes, SLOW, updates=NO_UPDATES)
    compute, _ = spans(UNEVEN.ring, report, sizes, SLOW)
    assert max(span.end for span in compute) == pytest.approx(predicted.forward)
    assert predicted.forward > 1.5 * max(predicted.passes[0].compute.sum(1)), "messages show"


def test_comparison_and_tune_read_the_same_time() -> None:
    report, layer = UNEVEN.verify(4), splits.Layer(ranks_per_node=1, rates=SLOW, block=1)
    found = splits._planned("zigzag", UNEVEN, layer)
    predicted = simulate(UNEVEN, report, layer.sizes, SLOW)
    alone = 1024 * layer.token_flops / SLOW.flops
    assert found.forward == pytest.approx(predicted.forward + alone)
    assert found.total == pytest.approx(predicted.both + 3 * alone)
    mask, sizes = Mask.causal(8192), MODEL.attention(1, 1)
    cost = next(
        cost
        for cost in AttentionCosts(MODEL, [[(mask, 1)]], 1, 4, 1, 4, SLOW)
        if cost.shape.name == "ring"
    )
    plan = Plan.build(mask, Layout.zigzag(8192, 4), "ring", node_size=4)
    updates = {0: rank_updates(plan.rank_plan(0), KERNELS["flash"])}
    assert cost.both == pytest.approx(
        simulate(plan, plan.verify(), sizes, SLOW, 4, updates=updates).both
    )


def test_a_ring_of_another_package_costs_what_ours_does_with_one_source_a_hop() -> None:
    """Two products of matrices in forward, five in backward, whatever the sizes of heads are."""
    sizes = AttentionSizes(8, 8, 192, 128)
    layer = splits.Layer(sizes, rates=Rates(memory=1e30, call=1e-30), block=1)
    ring = splits._Ring(4, 4096, 4096, 64)
    forward, backward = splits._hops_seconds(
        np.full((1, 4), 4096.0), np.zeros((1, 4)), ring.tokens, layer
    )
    assert forward == pytest.approx(4 * 4096 * 2 * 8 * (192 + 128) / layer.rates.flops)
    assert backward / forward == pytest.approx((3 * 192 + 2 * 128) / (192 + 128))


def test_native_windows_take_few_calls() -> None:
    plan = Plan.build(Mask.causal(8192, (128, 0)), Layout.zigzag(8192, 4))
    report, sizes = plan.verify(), AttentionSizes()
    times = {name: simulate(plan, report, sizes, kernel=KERNELS[name]).both for name in KERNELS}
    assert (
        times["flash"]
        == times["flash_aten"]
        < times["transformer_engine"]
        <= times["cudnn"]
        == times["cpu"]
    )
    assert times["cudnn"] > 5 * times["flash"]


def test_messages_travel_during_the_live_hop_before() -> None:
    live = np.array([[True, False, True, False], [True, True, False, False]])
    before, after = neighbors(live)
    assert before.tolist() == [[0, 0, 0, 2], [0, 0, 1, 1]] and after.tolist() == [
        [2, 2, 4, 4],
        [1, 4, 4, 4],
    ]
    one = Pass(np.array([[1.0, 2.0, 1.0]]), np.array([[3.0, 1.0, 0.0]]), 0.5)
    assert (
        one.begin.tolist() == [[0, 3, 5]]
        and one.seconds.tolist() == [6.5]
        and one.busy.tolist() == [4.5]
    )
    starts = in_turn(np.array([0.0, 5.0, 0.0]), np.array([1, 0, 1]), np.array([2.0, 1.0, 1.0]))
    assert starts.tolist() == [0.0, 5.0, 2.0]
