"""Heads exchanged among neighboring ranks, around the ring: against brute force in float64, on real
processes and in threads.
"""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cp_ring import Layout, Mask, Plan, plan_cache, ring_attention, roll, shard
from cp_ring.comm.groups import transport_for
from cp_ring.errors import ConfigError, PlanError
from cp_ring.inputs import Inputs
from cp_ring.plan import split_heads
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.time import Conditions
from cp_ring.plan_cache import PlanOptions
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, on_rank
from tests.rings import FLOAT32, attend, attend_to_shard, error_of, joined, off, refused, truth

FACTORS = [(2, 2), (4, 2), (4, 4), (6, 3), (6, 6), (8, 4)]
GROUPED = [(12, 1), (12, 2), (12, 3), (12, 4), (12, 6)]


def masks(n):
    return {
        "causal": Mask.causal(n),
        "window": Mask.causal(n, window=(n // 4 + 3, 0)),
        "documents": Mask.documents([0, 5, n // 2, n - 3], n=n),
    }


def attend_to_many(group, cases):
    return [attend_to_shard(group, *case) for case in cases]


def every_case(cp, heads):
    n = 12 * cp
    return [
        (
            Case.draw(n, b=2, h=h, g=g, d=8, e=12),
            Plan.build(mask, layout, ulysses=heads),
            torch.linspace(-1, 2, h),
        )
        for h, g in GROUPED
        if not unsplit(h, g, heads)
        for name, mask in masks(n).items()
        for layout in [
            Layout.zigzag(n, cp),
            *([Layout.balanced(mask, cp)] if name == "documents" else []),
        ]
    ]


def check(case, plan, sink, results):
    plan.verify(rank_plans=True)
    wanted = truth(case, plan.mask.dense(), sink)
    assert off(results, wanted) < FLOAT32, (plan.mask, plan.layout, plan.ulysses, case.k.shape)


@pytest.mark.parametrize("cp, heads", FACTORS)
def test_equals_brute_force(cp, heads):
    """Of two ranks, several key/value heads are exchanged and computed in 2 or 3 groups."""
    assert [split_heads(h, g, 2).groups for h, g in GROUPED[3:]] == [2, 3]
    cases = every_case(cp, heads)
    by_rank = LocalRing(cp).run(attend_to_many, cases)
    for number, case in enumerate(cases):
        check(*case, joined(case[1].layout, [results[number] for results in by_rank]))


@pytest.mark.parametrize(
    "options", [{"route": "ring"}, {"schedule": "gather"}, {"schedule": (0, 1, 2, 2)}], ids=str
)
def test_routes_and_schedules_of_the_ring(options):
    case, sink = Case.draw(96, h=4, g=2), torch.zeros(4)
    plan = Plan.build(Mask.causal(96), Layout.zigzag(96, 8), ulysses=2, **options)
    check(case, plan, sink, attend(case, plan, sink=sink))


def _by_default(group, case, between):
    """Attention of two nodes of two ranks each, with links of so many bytes a second between
    nodes; and how many ranks exchanged heads.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        rates = {
            "between": between,
            "forward": 1e9,
            "backward": 1e9,
            "call": 1e-12,
            "processors": 1,
        }
        slow = partial(Conditions, rates=replace(RATES, **rates))
        patch.setattr(plan_cache, "Conditions", slow)
        q, k, v, dout = shard(tuple(case), group=group)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        made = PlanOptions(causal=True).find(transport_for(group, q.device), Inputs(q, k, v), False)
        out = ring_attention(q, k, v, group, causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)], made.ulysses


# of different lengths, because plans are kept
@pytest.mark.parametrize("n, between, heads", [(64, 1e12, 1), (96, 1e6, 2)])
def test_heads_of_two_nodes_are_chosen_by_their_links(pool, n, between, heads):
    """The default: the ring where links are fast, heads of the ranks of a node where those between
    nodes are slow; the results are the same.
    """
    case = Case.draw(n, b=2, h=4, g=2, seed=3)
    found = pool.run(_by_default, 4, case, between)
    assert [chosen for _, chosen in found] == [heads] * 4
    plan = Plan.build(Mask.causal(n), Layout.zigzag(n, 4))
    results = joined(plan.layout, [parts for parts, _ in found])
    assert error_of(results, case, plan.mask) < FLOAT32


@pytest.mark.parametrize("h, g", [(4, 2), (4, 1)])
def test_bytes_of_the_exchange(pool, h, g):
    """q, k, v and out once each way: u - 1 of u parts of them leave; keys that ranks share go to
    each of them.
    """
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), ulysses=2)
    for _, counters in pool.run(on_rank, 4, Case.draw(64, h=h, g=g, d=16), plan):
        queries, keys = 2 * 2 * h // 2, 2 * 2  # heads, of 16 tokens of 16 numbers
        assert counters.bytes_by_kind["heads"] == (queries + keys) * 16 * 16 * 4


def test_ranks_with_other_heads_are_told():
    def other(group):
        q, k, v, _ = Case.draw(16, h=4, g=2)
        ring_attention(q, k, v, group, causal=True, heads=2 if group.rank else 4)

    with pytest.raises(
        PlanError,
        match=r"ranks of the group make different calls: .*heads is 4 on rank 0 and 2 on rank \d",
    ):
        LocalRing(4).run(other)


def test_a_checkpoint_leaves_no_message_that_nobody_takes():
    """Torch ends the second run of a checkpoint after the last tensor that forward saved."""
    n, left = 128, []
    case, layout = Case.draw(n, h=8, g=4), Layout.zigzag(n, 2)
    ring, both = LocalRing(2), threading.Barrier(2)

    def run(group):
        *leaves, dout = (layout.shard(x, group.rank, 1) for x in case)
        leaves = [x.requires_grad_() for x in leaves]
        out = checkpoint(
            lambda *x: ring_attention(*x, group, causal=True, heads=2), *leaves, use_reentrant=False
        )
        grads = torch.autograd.grad(out, leaves, dout)
        both.wait()
        left.append(len(ring._mail))
        both.wait()
        return [out.detach(), *grads]

    assert off(joined(layout, ring.run(run)), truth(case, np.tril(np.ones((n, n), bool)))) < FLOAT32
    assert left == [0, 0]


@pytest.mark.parametrize("call", [
    lambda x: ring_attention(x, x, x, causal=True),
    lambda x: roll(x, -1),
])  # fmt: skip
def test_a_second_derivative_is_rejected(call):
    x = torch.randn(1, 32, 2, 8, requires_grad=True)
    assert "create_graph=True: attention and shards have no second" in refused(
        ConfigError, torch.autograd.grad, call(x).sum(), x, create_graph=True
    )
