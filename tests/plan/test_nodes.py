"""Routes that know the nodes: the order of the hops, and `relay`, which sends keys to each other
node once.
"""

from __future__ import annotations

import numpy as np
import pytest

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.errors import PlanError
from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.schedule import Order, relay_schedule
from cp_ring.plan.tables import Transfers

SIZES = [(cp, size) for cp in (1, 2, 4, 6, 8, 12) for size in range(1, cp + 1) if cp % size == 0]


@pytest.mark.parametrize(("cp", "size"), SIZES)
def test_each_distance_has_one_owner_and_one_reader(cp, size):
    order, ranks = Order(cp, size), np.arange(cp)
    for owner in range(cp):
        distance = order.distance(ranks, owner)
        assert sorted(distance.tolist()) == list(range(cp))
        assert (order.reader(owner, distance) == ranks).all() and (
            order.owner(ranks, distance) == owner
        ).all()
        same_node = ranks // size == owner // size
        assert size in (1, cp) or (same_node == (distance < size)).all()


def between(table: Transfers, size: int) -> np.ndarray:
    """Tokens that each rank sends to other nodes and receives from them, [2, ranks]."""
    crossing = table[np.flatnonzero(table.sender // size != table.receiver // size)]
    count = int(max(table.sender.max(), table.receiver.max())) + 1
    return np.stack(
        [np.bincount(side, crossing.tokens, count) for side in (crossing.sender, crossing.receiver)]
    )


@pytest.mark.parametrize(("cp", "size"), [(4, 2), (6, 3), (8, 2), (8, 4), (64, 8)])
def test_keys_and_gradients_cross_to_each_node_once(cp, size):
    n = 64 * cp
    relay = Plan.build(Mask.full(n), Layout.zigzag(n, cp), "relay", node_size=size)
    direct = Plan.build(Mask.full(n), Layout.zigzag(n, cp), node_size=size)
    relay.verify(rank_plans=cp < 64)
    nodes, shard = cp // size, n // cp
    for table, straight in (
        (relay.ring.transfers, direct.ring.transfers),
        (relay.ring.gradients, direct.ring.gradients),
    ):
        # of every rank: all cards carry the same
        assert (between(table, size) == (nodes - 1) * shard).all()
        assert (between(straight, size) == (nodes - 1) * size * shard).all()


@pytest.mark.parametrize("route", ["direct", "relay"])
def test_a_rank_comes_to_its_own_node_first(route):
    plan = Plan.build(Mask.full(512), Layout.zigzag(512, 8), route, node_size=4)
    for rank in range(8):
        node = [
            source // 4 == rank // 4 for hop in plan.rank_plan(rank).hops for source in hop.sources
        ]
        assert node == sorted(node, reverse=True)
        if route == "direct":
            assert all(hop.receives for hop in plan.rank_plan(rank).hops[1:])


def test_other_routes_ignore_nodes():
    mask, layout = Mask.causal(64), Layout.zigzag(64, 4)
    assert Plan.build(mask, layout, "ring", node_size=2).ring.node_size == 1
    assert repr(Plan.build(mask, layout, "relay", node_size=1).rank_plan(1).hops) == repr(
        Plan.build(mask, layout, "direct", "ring").rank_plan(1).hops
    )


@pytest.mark.parametrize(
    ("cp", "size", "hops"),
    [
        (4, 2, (0, 1, 2, 3)),
        (6, 2, (0, 1, 2, 3, 3, 4)),
        (6, 3, (0, 1, 1, 2, 3, 4)),
        (8, 4, (0, 1, 1, 1, 2, 3, 3, 4)),
        (12, 4, (0, 1, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6)),
    ],
)
def test_schedule_of_a_relay(cp, size, hops):
    assert relay_schedule("auto", cp, size) == hops == relay_schedule(hops, cp, size)


def test_bad_sizes_and_schedules():
    mask, layout = Mask.causal(64), Layout.zigzag(64, 4)
    for size in (0, 3):
        with pytest.raises(PlanError, match=f"node_size={size}: it must divide the 4 ranks"):
            Plan.build(mask, layout, node_size=size)
    with pytest.raises(
        PlanError, match="schedule gather: the route relay has a schedule of its own"
    ):
        Plan.build(mask, layout, "relay", "gather", node_size=2)


@pytest.mark.parametrize(
    ("ranks", "per_node", "size"),
    [
        (range(8), 4, 4),
        (range(8), None, 1),
        (range(0, 16, 2), 8, 4),
        (range(0, 64, 8), 8, 1),
        ([0, 1, 2, 4, 5, 6], 4, 3),
        ([0, 1, 2, 4], 4, 1),
        ([0, 4, 1, 5], 4, 1),
        ([], 4, 1),
    ],
)
def test_ranks_of_a_group_on_a_node(ranks, per_node, size):
    assert node_size(list(ranks), per_node) == size


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, None),
    ],
)
def test_ranks_of_a_node_by_the_launcher(environment, ranks):
    assert ranks_per_node(environment) == ranks
