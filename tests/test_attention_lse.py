"""Gradients of the returned lse, alone and with those of out, against dense scores in float64."""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, dense
from tests.rings import joined, off, rank_of

N = 48
WINDOW, DOCUMENTS = Mask.causal(N, window=(13, 0)), Mask.documents([0, 7, 30, 41], n=N)
PLANS = {
    "cp 1": Plan.build(WINDOW, Layout.contiguous(N, 1)),
    "cp 2, padding": Plan.build(DOCUMENTS, Layout.zigzag(N, 2)),
    "cp 3": Plan.build(WINDOW, Layout.balanced(WINDOW, 3)),
    "cp 4": Plan.build(WINDOW, Layout.zigzag(N, 4)),
    "cp 4, heads": Plan.build(WINDOW, Layout.zigzag(N, 4), ulysses=2),
    "cp 2, heads alone": Plan.build(DOCUMENTS, Layout.zigzag(N, 2), ulysses=2),
}
SINK = torch.tensor([-1.0, 0.0, 0.5, 3.0])
CASE, DLSE = Case.draw(N, b=2, h=4, g=2, d=8, e=12), torch.randn(2, N, 4, dtype=torch.float64)


def loss_of(out, lse, dout, dlse):
    """Linear in out and lse; queries that see no key have no finite lse."""
    return (out * dout).sum() + (torch.where(lse.isinf(), 0.0, lse) * dlse.transpose(1, 2)).sum()


def on_rank(group, plan, case, dlse, sink, both, **options):
    q, k, v, dout, dlse = (plan.layout.shard(x, rank_of(group), 1) for x in (*case, dlse))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = ring_attention(
        *leaves[:3], group, plan=plan, sink=leaves[3], return_lse=True, **options
    )
    loss = loss_of(out, lse, dout * both, dlse)
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def wanted_of(case, allowed, sink, both):
    leaves = [x.double().clone().requires_grad_() for x in (*case[:3], sink)]
    out, lse = dense(*leaves[:3], allowed, sink=leaves[3])
    return [
        out.detach(),
        *torch.autograd.grad(loss_of(out, lse, case.dout.double() * both, DLSE), leaves),
    ]


@pytest.mark.parametrize("both", [1.0, 0.0], ids=["with out", "alone"])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_lse_are_those_of_dense_scores(name, both):
    plan = PLANS[name]
    for kernel, dtype, bound in (("reference", torch.float64, 1e-14), ("cpu", torch.float32, 2e-6)):
        typed = [x.to(dtype) for x in (*CASE, DLSE, SINK)]
        parts = LocalRing(plan.cp).run(
            on_rank, plan, Case(*typed[:4]), *typed[4:], both, kernel=kernel
        )
        wanted = wanted_of(CASE, plan.mask.dense(), SINK, both)
        if not both:  # of queries without keys, too
            parts = [[part[0], *part[1:3], part[3] + 1, part[4]] for part in parts]
            wanted[3] = wanted[3] + 1
        assert off(joined(plan, parts), wanted) < bound, kernel
