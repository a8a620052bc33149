"""Predicted times over two classes of links, and the choice of a shape by them."""

from __future__ import annotations

import pytest

from cp_ring.errors import PlanError
from cp_ring.plan import Layout, Mask
from cp_ring.plan.costs.cost import crossing
from cp_ring.plan.costs.rank_updates import rank_updates
from cp_ring.plan.costs.shapes import Assumed, choose, costed, planned, shapes_of
from cp_ring.plan.costs.simulate import simulate
from cp_ring.plan.lower import ASSUMED, KERNELS
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=16, dtype="fp32")
FREE = {"memory": 1e30, "call": 1e-30}


def predicted(plan, ranks_per_node, sizes=SIZES, **rates):
    return simulate(plan, plan.verify(plan.cp), sizes, Rates(**FREE, **rates), ranks_per_node)


def test_times_by_hand():
    """Full mask, 4 ranks of 16 tokens on nodes of 2, one source a hop: the neighbor's keys come
    fast, the others slowly.
    """
    plan = Plan.build(Mask.full(64), Layout.contiguous(64, 4), schedule="ring", node_size=2)
    pair, shard = 4 * 4 * 16, 16 * 2 * 2 * 16 * 4  # FLOP of a pair in forward, bytes of a shard
    rates = {"flops": 256 * pair, "inside": shard / 0.5, "between": shard / 3}
    found = predicted(plan, 2, **rates)
    # A hop computes for 1 s; the keys of hop 1 take 0.5 s, those of hops 2 and 3 take 3 s each.
    assert found.forward == pytest.approx(1 + 3 + 3 + 1)
    assert found.exposed_forward == pytest.approx(4)
    assert found.efficiency_forward == pytest.approx(4 / 8)
    # Backward: halves of 1.25 s around hops of 2.5 s. Gradients of hop 1 are fast, those of hops 2
    # and 3 take 3 s each,
    # while the keys of hop 2 and 3 take 3 s each. Both directions of both links are busy at the
    # same time.
    assert found.both - found.forward == pytest.approx(1.25 + 3 + 3 + 3 + 3)
    assert found.bytes_per_card == 2 * shard
    assert predicted(plan, 2, **rates, ranks_per_card=2).bytes_per_card == 4 * shard
    near = predicted(plan, 4, **rates | {"between": 1})
    assert (
        near.exposed_both == 0
        and near.bytes_per_card == 0
        and near.efficiency_both == pytest.approx(1)
    )


def test_one_card_carries_the_ring():
    """On the route ring one rank of a node sends all that leaves it: its own card is as busy as a
    card of the whole node.
    """
    plan = Plan.build(Mask.full(64), Layout.contiguous(64, 4), "ring")
    direct = Plan.build(Mask.full(64), Layout.contiguous(64, 4), node_size=2)
    alone, shared = (
        predicted(plan, 2, flops=1e30, inside=1e30, between=1.0, ranks_per_card=n) for n in (1, 2)
    )
    assert alone.bytes_per_card == shared.bytes_per_card
    one, both = (
        predicted(direct, 2, flops=1e30, inside=1e30, between=1.0, ranks_per_card=n) for n in (1, 2)
    )
    assert both.bytes_per_card == 2 * one.bytes_per_card and both.forward == pytest.approx(
        2 * one.forward
    )


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cards_carry_what_crosses(heads, kv_heads):
    """With one card a node and a full mask, what leaves the cards is what the plan says crosses
    nodes.
    """
    sizes = AttentionSizes(heads=4, kv_heads=kv_heads, head_dim=16, dtype="fp32")
    plan = planned(Mask.full(128), 8, PlanSpec("contiguous", ulysses=heads, node_size=2))
    found, moved = predicted(plan, 2, sizes, ranks_per_card=2), crossing(plan, sizes, 2)
    assert found.bytes_per_card * 4 == moved.keys + moved.exchange


def test_exchange_of_heads_takes_time():
    plan = planned(Mask.causal(256), 4, PlanSpec(ulysses=4))
    fast, slow = (predicted(plan, 1, flops=1e30, between=rate) for rate in (1e9, 1e8))
    # One key/value head for two ranks: one group, so the whole exchange is exposed; 3 of 4 heads
    # travel, and the outputs.
    tokens, width = 64, 16 * 4
    inputs, outputs = 3 * tokens * (1 + 2) * width, 3 * tokens * width
    assert (
        slow.exposed_forward
        == pytest.approx((inputs + outputs) / 1e8)
        == pytest.approx(10 * fast.exposed_forward)
    )


def test_all_ranks_or_a_sample():
    plan = Plan.build(Mask.causal(65536), Layout.zigzag(65536, 8))
    every = {rank: rank_updates(plan.rank_plan(rank), KERNELS[ASSUMED]) for rank in range(8)}
    report, sizes = plan.verify(), AttentionSizes()
    few, all_of_them = simulate(plan, report, sizes), simulate(plan, report, sizes, updates=every)
    assert few.both == pytest.approx(all_of_them.both, rel=0.01)


def every(node_size, **asked):
    return PlanSpec(**{"route": "auto", "node_size": node_size} | asked)


def test_shapes_that_are_possible():
    names = [shape.name for shape in shapes_of(8, AttentionSizes(8, 2), every(4))]
    assert names == ["direct", "ring", "relay", "heads 2", "heads 2 relay", "heads 4", "heads 8"]
    assert [shape.name for shape in shapes_of(8, AttentionSizes(4, 2), every(8))] == [
        "direct",
        "ring",
        "heads 2",
        "heads 4",
    ]
    assert [
        shape.name for shape in shapes_of(8, AttentionSizes(4, 2), every(4, route="relay"), 2)
    ] == ["heads 2 relay"]
    assert [shape.name for shape in shapes_of(4, AttentionSizes(4, 2), every(2, schedule="gather"))] == [
        "direct gather", "ring gather", "heads 2 gather", "heads 4 gather",
    ]  # fmt: skip


def test_the_choice_follows_the_rates():
    n, assumed = 64 * 2048, Assumed(AttentionSizes(64, 8), ranks_per_node=8)
    layers = [(Mask.causal(n), 1)]
    # short shards, nodes of 8: heads inside the nodes
    assert choose(layers, 64, every(8), assumed).shape.name == "heads 8"
    free = assumed._replace(rates=Rates(**FREE, inside=1e14, between=1e14))
    # nothing is exposed, calls and merges are free: the simplest
    assert choose(layers, 64, every(8), free).shape.name == "direct"
    relay = choose(layers, 64, every(8, slot_shards=7), assumed, heads=1)
    assert relay.shape.name == "relay" and "direct" in relay.reason
    bounded = choose(layers, 64, every(8), assumed, heads=1)
    assert bounded.shape.name == "direct"
    assert bounded.reason.endswith("but it needs slot_shards 7") and "\n" not in bounded.reason


def test_memory_bounds_the_choice():
    layers, assumed = [(Mask.full(16 * 1024), 1)], Assumed(AttentionSizes(), ranks_per_node=8)
    with pytest.raises(
        PlanError, match=r"slot_shards 4: no shape fits; relay .* ms, but it needs slot_shards 7"
    ):
        choose(layers, 16, every(8, route="relay"), assumed, heads=1)
    with pytest.raises(PlanError, match="heads=3: it must divide"):
        choose(layers, 16, every(8), assumed, heads=3)


def test_buffers_of_a_shape():
    plan = planned(Mask.full(1024), 8, PlanSpec(route="relay", node_size=4))
    assert costed(plan, plan.verify(), Assumed(SIZES, ranks_per_node=4)).slot_shards == 3
