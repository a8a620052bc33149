"""Replay on the CPU: the schedule and the bytes are the plan's."""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.plan.cost import cost
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from tests.gpu.job import RankSizes
from tests.gpu.one_device import replay

SIZES = RankSizes(tokens=64, h=4, g=2, d=16, e=24, dtype=torch.float32, device="cpu")


def test_a_rank_receives_what_its_plan_says():
    plan = Plan.build(Mask.causal(256), Layout.zigzag(256, 4))
    for rank in range(4):
        hops = plan.rank_plan(rank).hops
        keys = sum(receive.tokens for hop in hops for receive in hop.receives)
        grads = sum(transfer.tokens for hop in hops for transfer in hop.grad_receives)
        found = replay(plan, rank, SIZES)
        # Keys in forward and again in backward; gradients in backward.
        assert found.received == (2 * keys + grads) * SIZES.g * (SIZES.d + SIZES.e) * 4


def peaks(cp, schedule, mask=Mask.causal):
    """The allocator's peak over q, k, v, out and lse of the first rank, one in the middle, and the
    last.
    """
    n = cp * SIZES.tokens
    plan = Plan.build(mask(n), Layout.zigzag(n, cp), schedule=schedule)
    return [replay(plan, rank, SIZES).peak for rank in (0, cp // 2, cp - 1)]


def test_memory_does_not_grow_with_ranks():
    """The same to the byte from 4 ranks to 64; 2 ranks use one slot alone."""
    n = SIZES.tokens
    few, many = peaks(4, "ring"), peaks(64, "ring")
    assert few == many
    slot = n * SIZES.g * (SIZES.d + SIZES.e) * 4
    assert 0 <= max(many) - max(peaks(2, "ring")) < 4 * slot
    assert max(many) > 4 * slot  # it measures something


def test_memory_of_several_sources_does_not_grow_with_ranks():
    """The same to the byte as soon as two hops in succession have 4 sources: from 16 ranks on, amid
    a causal mask from 32 on.
    """
    assert peaks(16, "auto", Mask.full) == peaks(64, "auto", Mask.full)
    few, more, most = (peaks(cp, "auto") for cp in (16, 32, 64))
    assert more == most
    assert (few[0], few[2]) == (most[0], most[2]) and few[1] < most[1]


@pytest.mark.parametrize(("schedule", "ranks"), [("ring", (4, 16, 64)), ("auto", (8, 16, 64))])
def test_planned_memory_is_flat(schedule, ranks):
    """What `cp-ring plan` says of every buffer."""
    tables = []
    for cp in ranks:
        plan = Plan.build(Mask.causal(cp * 128), Layout.zigzag(cp * 128, cp), schedule=schedule)
        tables.append(cost(plan.verify(), AttentionSizes()).memory)
    assert tables[0] == tables[1] == tables[2]
    assert all(tables[0].values())
