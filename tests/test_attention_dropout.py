"""Attention dropout: the same bits on any number of ranks, against brute force in float64 with the
same mask.
"""

from __future__ import annotations

import math

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.kernels import dropout
from cp_ring.kernels.dropout import keep, mixed, philox
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error

N, P, SEED = 48, 0.3, 7
MASK = Mask.causal(N)


def words(counter, key):
    return [f"{int(word):08x}" for word in philox(tuple(map(torch.tensor, counter)), key)]


def test_philox_is_that_of_its_authors():
    """The test vectors of Random123."""
    ones = 0xFFFFFFFF
    assert words((0, 0, 0, 0), 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert words((ones,) * 4, ones << 32 | ones) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words(pi, 0x299F31D0 << 32 | 0xA4093822) == [
        "d16cfe09",
        "94fdcceb",
        "5001e420",
        "24126ea1",
    ]


def test_weights_are_kept_as_often_as_asked_and_independently():
    row, position = torch.zeros(1, 256, dtype=torch.int64), torch.arange(256)[None]
    bits = keep(mixed(1), 0.25, list(range(8)), row, position, position)[0].double()
    assert abs(float(bits.mean()) - 0.75) < 0.003
    others = [
        keep(mixed(2), 0.25, list(range(8)), row, position, position)[0].double(),
        bits.roll(1, 0),
        bits.roll(1, 1),
        bits.mT,
    ]
    flat = (bits - bits.mean()).flatten()
    for other in others:
        assert abs(float(flat @ (other - other.mean()).flatten()) / len(flat) / 0.1875) < 0.01
    again = keep(mixed(1), 0.25, [5, 2], row[:, :2] + 3, position[:, 7:9], position[:, 100:])
    assert not torch.equal(again[0, 0].double(), bits[5, 7:9, 100:])  # another batch row
    assert torch.equal(
        keep(mixed(1), 0.25, [5], row[:, :2], position[:, 7:9], position[:, 100:])[0, 0].double(),
        bits[5, 7:9, 100:],
    )


def bits_of_call(case, mask, key):
    """The declared bits, bool [b, h, n, n], of whole batch rows."""
    b, n, h = case.q.shape[:3]
    row, position = torch.arange(b)[:, None].expand(b, n), torch.arange(n).expand(b, n)
    return keep(key, P, list(range(h)), row, position, position)


def truth(case, mask, seed=SEED):
    """out, dq, dk and dv in float64, by autograd through a dense softmax."""
    q, k, v = (x.detach().double().requires_grad_() for x in case[:3])
    shared = q.shape[2] // k.shape[2]
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(shared, 2)) * q.shape[-1] ** -0.5
    )
    weights = scores.masked_fill(~torch.from_numpy(mask.dense()), -math.inf).softmax(-1)
    weights = weights * bits_of_call(case, mask, mixed(seed)) / (1 - P)
    out = torch.einsum("bhqk,bkhe->bqhe", weights, v.repeat_interleave(shared, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), case.dout.double())]


def on_rank(group, case, plan, seed=SEED, **options):
    shards = [plan.layout.shard(x, group.rank, 1) for x in case]
    q, k, v = (x.detach().requires_grad_() for x in shards[:3])
    out = ring_attention(q, k, v, group, plan=plan, dropout_p=P, dropout_seed=seed, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), shards[3])]


def run(case, plan, **options):
    parts = LocalRing(plan.cp).run(on_rank, case, plan, **options)
    return [plan.layout.unshard([part[i] for part in parts], 1) for i in range(4)]


PLANS = {
    "cp 1": lambda: Plan.build(MASK, Layout.contiguous(N, 1)),
    "zigzag": lambda: Plan.build(MASK, Layout.zigzag(N, 2)),
    "zigzag of 4": lambda: Plan.build(MASK, Layout.zigzag(N, 4)),
    "contiguous, ring": lambda: Plan.build(
        MASK, Layout.contiguous(N, 4), route="ring", schedule="ring"
    ),
    "relay": lambda: Plan.build(MASK, Layout.zigzag(N, 4), route="relay", node_size=2),
    "gather": lambda: Plan.build(MASK, Layout.zigzag(N, 4), schedule="gather"),
    "balanced": lambda: Plan.build(MASK, Layout.balanced(MASK, 4, 4)),
    "heads": lambda: Plan.build(MASK, Layout.zigzag(N, 4), ulysses=2),
    "heads alone": lambda: Plan.build(MASK, Layout.zigzag(N, 4), ulysses=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_bits_are_the_same_however_the_call_is_split(name):
    """With equal scores and a channel for each key, out shows the weights: zero where one is
    dropped, exactly.
    """
    zeros, ones = (
        torch.zeros(2, N, 4, 4),
        torch.eye(N)[None, :, None].expand(2, -1, 4, -1).contiguous(),
    )
    case = Case(zeros, zeros, ones, torch.zeros(2, N, 4, N))
    seen = torch.from_numpy(MASK.dense()) & bits_of_call(case, MASK, mixed(SEED))
    for kernel in ("reference", "cpu"):
        out = run(case, PLANS[name](), kernel=kernel)[0]
        assert torch.equal(out.transpose(1, 2) != 0, seen)


@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_are_those_of_brute_force(name):
    case = Case.draw(N, b=2, h=8, g=4, d=8, e=12)
    wanted = truth(case, MASK)
    for kernel, dtype, bound in (("reference", torch.float64, 1e-14), ("cpu", torch.float32, 2e-6)):
        found = run(Case(*(x.to(dtype) for x in case)), PLANS[name](), kernel=kernel)
        assert max(error(x, y) for x, y in zip(found, wanted, strict=True)) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_exact_in_16_bits(dtype):
    case = Case.draw(640, h=2, g=1, d=4, dtype=dtype)
    mask = Mask.causal(640)
    wanted = truth(case, mask)
    found = run(case, Plan.build(mask, Layout.zigzag(640, 2)))
    assert max(error(x, y) for x, y in zip(found, wanted, strict=True)) < 2e-2


def test_batch_rows_with_masks_of_their_own_have_the_bits_of_their_positions():
    masks = [Mask.documents([0, 11, N]), Mask.causal(N)]
    case = Case.draw(N, b=2, h=4, g=2, d=8)
    layouts = [Layout.zigzag(N, 2), Layout.balanced(masks[1], 2, 4)]
    plan = Plan.build(Mask.batch(masks), Layout.batch(layouts))

    def rank(group):
        parts = [
            [layout.shard(x[row : row + 1], group.rank, 1) for row, layout in enumerate(layouts)]
            for x in case[:3]
        ]
        return ring_attention(
            *map(torch.cat, parts), group, plan=plan, dropout_p=P, dropout_seed=SEED
        )

    parts = LocalRing(2).run(rank)
    for row, layout in enumerate(layouts):
        out = layout.unshard([part[row : row + 1] for part in parts], 1)
        assert error(out, truth(case, masks[row])[0][row : row + 1]) < 2e-6


def test_scores_are_held_in_blocks(monkeypatch):
    case = Case.draw(N, h=2, g=1, d=8)
    whole = run(case, PLANS["zigzag"]())
    monkeypatch.setattr(dropout, "_BLOCK", 100)
    assert max(error(x, y) for x, y in zip(run(case, PLANS["zigzag"]()), whole, strict=True)) < 1e-6


def test_what_cannot_be_is_rejected_in_one_line():
    case = Case.draw(N, h=2, g=1, d=8)
    plan = PLANS["cp 1"]()
    with pytest.raises(ConfigError, match="dropout_p=1: it must be from 0 to below 1"):
        ring_attention(*case[:3], plan=plan, dropout_p=1, dropout_seed=1)
    with pytest.raises(ConfigError, match="dropout_seed=None: dropout needs a whole number"):
        ring_attention(*case[:3], plan=plan, dropout_p=0.1)
    with pytest.raises(ConfigError, match=r"dropout_p=0\.1: give the plan of all ranks"):
        ring_attention(*case[:3], plan=plan.rank_plan(0), dropout_p=0.1, dropout_seed=1)
    with pytest.raises(KernelError, match=r"draws attention dropout by another rule|runs on CUDA"):
        ring_attention(*case[:3], plan=plan, dropout_p=0.1, dropout_seed=1, kernel="flash_aten")
    with pytest.raises(PlanError, match="dropout_p"):
        LocalRing(2).run(
            lambda group: ring_attention(
                *Case.draw(8)[:3], group, dropout_p=0.1 * group.rank, dropout_seed=1
            )
        )
    with pytest.raises(PlanError, match="dropout_seed"):
        LocalRing(2).run(
            lambda group: ring_attention(
                *Case.draw(8)[:3], group, dropout_p=0.1, dropout_seed=group.rank
            )
        )
