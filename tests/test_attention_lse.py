"""The returned lse and its gradients, alone and with those of out, against dense scores in float64."""

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
    """Out, lse [b, s, h] and gradients of this rank's tokens, and its part of that of the sink."""
    q, k, v, dout, dlse = (plan.layout.shard(x, rank_of(group), 1) for x in (*case, dlse))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
    out, lse = ring_attention(
        *leaves[:3], group, plan=plan, sink=leaves[3], return_lse=True, **options
    )
    loss = loss_of(out, lse, dout * both, dlse)
    found = out.detach(), lse.detach().transpose(1, 2)
    return [*found, *torch.autograd.grad(loss, leaves)]


def wanted_of(case, allowed, sink, both):
    leaves = [x.double().clone().requires_grad_() for x in (*case[:3], sink)]
    out, lse = dense(*leaves[:3], allowed, sink=leaves[3])
    loss = loss_of(out, lse, case.dout.double() * both, DLSE)
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("both", [1.0, 0.0], ids=["with out", "alone"])
@pytest.mark.parametrize("name", PLANS)
def test_lse_and_its_gradients_are_those_of_dense_scores(name, both):
    """Lse is float32 for inputs of 32 bits and less; it has the sink in it."""
    plan = PLANS[name]
    for kernel, dtype, bound in (("reference", torch.float64, 1e-14), ("cpu", torch.float32, 2e-6)):
        typed = [x.to(dtype) for x in (*CASE, DLSE, SINK)]
        parts = LocalRing(plan.cp).run(
            on_rank, plan, Case(*typed[:4]), *typed[4:], both, kernel=kernel
        )
        results = joined(plan.layout, parts, sharded=5)
        wanted = wanted_of(CASE, plan.mask.dense(), SINK, both)
        if not both:  # no gradient of v is 0, whose error is relative to 1
            results[4], wanted[4] = results[4] + 1, wanted[4] + 1
        assert results[1].dtype == dtype
        assert off(results, wanted) < bound, kernel


def test_lse_of_batch_rows_that_are_one_stream():
    rows, layout = Mask.batch([WINDOW] * 2), Layout.batch([Layout.zigzag(N, 1)] * 2)
    _, streamed = ring_attention(*CASE[:3], mask=rows, layout=layout, return_lse=True)
    _, lse = ring_attention(*CASE[:3], mask=WINDOW, return_lse=True)
    torch.testing.assert_close(streamed, lse)
