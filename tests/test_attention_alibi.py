"""ALiBi: a bias by distance and head, the same however the call is split, against brute force in
float64.
"""

from __future__ import annotations

import math

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.kernels.dropout import mixed
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error
from tests.test_attention_dropout import bits_of_call

N, H = 48, 8
SLOPES = [2.0 ** -(head + 1) for head in range(H)]
CAUSAL, WINDOW = Mask.causal(N), Mask.causal(N, window=(9, 0))
DOCUMENTS, BOTH_WAYS = Mask.documents([0, 7, 30, N]), Mask.full(N, window=(12, 5))
PLANS = {
    "cp 1": lambda: Plan.build(CAUSAL, Layout.contiguous(N, 1)),
    "zigzag of 4": lambda: Plan.build(CAUSAL, Layout.zigzag(N, 4)),
    "window": lambda: Plan.build(WINDOW, Layout.zigzag(N, 2)),
    "documents, balanced": lambda: Plan.build(DOCUMENTS, Layout.balanced(DOCUMENTS, 4, 4)),
    "both ways": lambda: Plan.build(BOTH_WAYS, Layout.zigzag(N, 2)),
    "contiguous, ring": lambda: Plan.build(
        CAUSAL, Layout.contiguous(N, 4), route="ring", schedule="ring"
    ),
    "heads": lambda: Plan.build(CAUSAL, Layout.zigzag(N, 4), ulysses=2),
}


def truth(case, mask, dropout=None):
    """out, dq, dk and dv in float64, by autograd through a dense softmax with a dense bias."""
    q, k, v = (x.detach().double().requires_grad_() for x in case[:3])
    shared = q.shape[2] // k.shape[2]
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(shared, 2)) * q.shape[-1] ** -0.5
    )
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs().double()
    scores = scores - torch.tensor(SLOPES, dtype=torch.float64)[:, None, None] * distance
    weights = scores.masked_fill(~torch.from_numpy(mask.dense()), -math.inf).softmax(-1)
    weights = weights if dropout is None else weights * dropout
    out = torch.einsum("bhqk,bkhe->bqhe", weights, v.repeat_interleave(shared, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), case.dout.double())]


def run(case, plan, **options):
    def rank(group):
        shards = [plan.layout.shard(x, group.rank, 1) for x in case]
        q, k, v = (x.detach().requires_grad_() for x in shards[:3])
        out = ring_attention(q, k, v, group, plan=plan, alibi_slopes=SLOPES, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), shards[3])]

    parts = LocalRing(plan.cp).run(rank)
    return [plan.layout.unshard([part[i] for part in parts], 1) for i in range(4)]


def mask_of(name):
    masks = {"window": WINDOW, "documents, balanced": DOCUMENTS, "both ways": BOTH_WAYS}
    return masks.get(name, CAUSAL)


@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_are_those_of_brute_force(name):
    case = Case.draw(N, b=2, h=H, g=4, d=8, e=12)
    wanted = truth(case, mask_of(name))
    for kernel, dtype, bound in (("reference", torch.float64, 1e-14), ("cpu", torch.float32, 2e-6)):
        found = run(Case(*(x.to(dtype) for x in case)), PLANS[name](), kernel=kernel)
        assert max(error(x, y) for x, y in zip(found, wanted, strict=True)) < bound


def test_it_goes_together_with_dropout():
    case = Case.draw(N, b=2, h=H, g=4, d=8)
    dropout = bits_of_call(case, CAUSAL, mixed(7)) / 0.7
    found = run(case, PLANS["zigzag of 4"](), dropout_p=0.3, dropout_seed=7)
    assert max(error(x, y) for x, y in zip(found, truth(case, CAUSAL, dropout), strict=True)) < 2e-6


def test_distances_are_those_of_the_batch_row():
    case = Case.draw(N, b=2, h=H, g=4, d=8)
    masks = [DOCUMENTS, CAUSAL]
    layouts = [Layout.zigzag(N, 2), Layout.balanced(CAUSAL, 2, 4)]
    plan = Plan.build(Mask.batch(masks), Layout.batch(layouts))

    def rank(group):
        parts = [
            [layout.shard(x[row : row + 1], group.rank, 1) for row, layout in enumerate(layouts)]
            for x in case[:3]
        ]
        return ring_attention(
            *map(torch.cat, parts), group, plan=plan, alibi_slopes=torch.tensor(SLOPES)
        )

    parts = LocalRing(2).run(rank)
    for row, layout in enumerate(layouts):
        out = layout.unshard([part[row : row + 1] for part in parts], 1)
        assert error(out, truth(case, masks[row])[0][row : row + 1]) < 2e-6


def test_what_cannot_be_is_rejected_in_one_line():
    case, plan = Case.draw(N, h=2, g=1, d=8), PLANS["cp 1"]()
    with pytest.raises(
        PlanError, match="alibi_slopes must hold one finite number for each of 2 query heads"
    ):
        ring_attention(*case[:3], plan=plan, alibi_slopes=[0.5])
    with pytest.raises(ConfigError, match="alibi_slopes are constants"):
        ring_attention(*case[:3], plan=plan, alibi_slopes=torch.ones(2, requires_grad=True))
    with pytest.raises(ConfigError, match="alibi_slopes: give the plan of all ranks"):
        ring_attention(*case[:3], plan=plan.rank_plan(0), alibi_slopes=[0.5, 0.25])
    with pytest.raises(KernelError, match=r"has no ALiBi of tiles|runs on CUDA"):
        ring_attention(*case[:3], plan=plan, alibi_slopes=[0.5, 0.25], kernel="flash_aten")
    with pytest.raises(
        ConfigError, match="wire='int8' does not support alibi_slopes, for which positions travel"
    ):
        LocalRing(2).run(
            lambda group: ring_attention(
                *Case.draw(8)[:3], group, alibi_slopes=[0.5] * 4, wire="int8"
            )
        )
    with pytest.raises(PlanError, match="alibi_slopes"):
        LocalRing(2).run(
            lambda group: ring_attention(
                *Case.draw(8)[:3], group, alibi_slopes=[0.5 + group.rank] * 4
            )
        )
