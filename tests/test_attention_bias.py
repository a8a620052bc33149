"""A bias of scores, a tensor of this rank's queries by all keys, and its gradient, against dense
scores in float64.
"""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, PlanError
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.rings import FLOAT32, joined, off, rank_of, scores_of, truth

N = 40
MASK = Mask.documents([0, 7, 30, N], window=(13, 0))
PLANS = {
    "cp 1": Plan.build(MASK, Layout.contiguous(N, 1)),
    "cp 2, ring": Plan.build(Mask.causal(N), Layout.zigzag(N, 2), "ring", "ring"),
    "cp 3, balanced": Plan.build(MASK, Layout.balanced(MASK, 3)),
    "cp 4, padding": Plan.build(Mask.documents([0, 7, 30], n=N), Layout.zigzag(N, 4)),
    "cp 8": Plan.build(Mask.full(N), Layout.contiguous(N, 8)),
}
CASE = Case.draw(N, b=2, h=4, g=2, d=8, e=12)
SINK = torch.tensor([-1.0, 0.0, 0.5, 3.0])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def on_rank(group, plan, case, bias, sink=None, form="bshd", **options):
    """Out and the gradients of q, k, v, bias and sink."""
    rank = rank_of(group)
    q, k, v, dout = (plan.layout.shard(x, rank, 1) for x in case)
    bias = bias if bias.shape[2] == 1 else plan.layout.shard(bias, rank, 2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias, sink) if x is not None]
    q, k, v = (x.transpose(0, 1) if form == "sbhd" else x for x in leaves[:3])
    options |= {} if sink is None else {"sink": leaves[4]}
    out = ring_attention(q, k, v, group, plan=plan, bias=leaves[3], qkv_format=form, **options)
    out = out.transpose(0, 1) if form == "sbhd" else out
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def found(plan, bias, **options):
    parts = LocalRing(plan.cp).run(on_rank, plan, CASE, bias, **options)
    whole = joined(plan, [part[:4] for part in parts])
    of_bias = [part[4] for part in parts]
    summed = sum(of_bias) if bias.shape[2] == 1 else plan.layout.unshard(of_bias, 2)
    return [*whole, summed, *([sum(part[5] for part in parts)] if "sink" in options else [])]


def wanted(plan, bias, sink=None, **options):
    """Gradients of the bias, too: `truth` differentiates through it."""
    leaf = bias.double().requires_grad_()
    offsets = torch.full((4,), -1e9) if sink is None else sink  # some queries see no key
    options = {name: x for name, x in options.items() if name == "softcap"}
    out, dq, dk, dv, dsink = truth(CASE, plan.mask.dense(), offsets, leaf.detach(), **options)
    case = Case(*(x.double() for x in CASE))
    with torch.enable_grad():
        scores = scores_of(*case[:2], plan.mask.dense(), leaf, **options)
        further = offsets.double()[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, further], -1).softmax(-1)[..., :N]
        whole = torch.einsum("bhqk,bkhe->bqhe", weights, case.v.repeat_interleave(2, 2))
        (dbias,) = torch.autograd.grad(whole, leaf, case.dout)
    return [out, dq, dk, dv, dbias, *([] if sink is None else [dsink])]


@pytest.mark.parametrize("shape", [(2, 4, N, N), (1, 4, N, N), (1, 1, N, N), (2, 1, 1, N)])
@pytest.mark.parametrize("name", PLANS)
def test_equals_dense_scores(name, shape):
    plan, bias = PLANS[name], draw(*shape)
    for options in ({}, {"sink": SINK, "softcap": 1.5, "form": "sbhd"}):
        assert off(found(plan, bias, **options), wanted(plan, bias, **options)) < FLOAT32, options


def test_with_slopes_and_dropout_and_twice():
    """It is added to what ALiBi subtracts, and a second backward does not count the first."""
    plan, bias = PLANS["cp 2, ring"], draw(1, 4, N, N)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    both = wanted(plan, bias - (slopes[:, None, None] * distance).float())
    assert off(found(plan, bias, alibi_slopes=slopes), both) < FLOAT32
    options = {"dropout_p": 0.3, "dropout_seed": 1}
    alone = Plan.build(plan.mask, Layout.contiguous(N, 1))
    assert off(found(plan, bias, **options), found(alone, bias, **options)) < FLOAT32
    q, k, v, dout = (x.clone().requires_grad_() for x in CASE)
    leaf = bias.clone().requires_grad_()
    out = ring_attention(q, k, v, bias=leaf)
    first, again = (torch.autograd.grad(out, leaf, dout, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *again) and first[0].abs().sum() > 1


def test_relative_positions_learn():
    """The table of T5's biases: its gradient is the sum of those of all ranks."""
    plan = PLANS["cp 4, padding"]
    table = draw(4, 2 * N - 1)
    relative = torch.arange(N)[:, None] - torch.arange(N) + N - 1

    def one(group):
        leaf = table.clone().requires_grad_()
        mine = plan.layout.positions(group.rank)
        bias = leaf[:, relative[torch.from_numpy(mine)]][None]
        q, k, v, dout = (plan.layout.shard(x, group.rank, 1) for x in CASE)
        out = ring_attention(q, k, v, group, plan=plan, bias=bias)
        return torch.autograd.grad(out, leaf, dout)[0]

    leaf = table.double().requires_grad_()
    dense = leaf[:, relative][None]
    (expected,) = torch.autograd.grad(dense, leaf, wanted(plan, dense.detach().float())[4])
    assert off([sum(LocalRing(4).run(one))], [expected]) < FLOAT32


def test_masks_by_head_take_their_heads():
    bias, masks = draw(1, 4, N, N), [(2, Mask.causal(N)), (2, Mask.full(N))]
    out = ring_attention(*CASE[:3], mask=masks, bias=bias)
    for heads, kv, (_, mask) in (
        (slice(2), slice(1), masks[0]),
        (slice(2, 4), slice(1, 2), masks[1]),
    ):
        part = (CASE.q[:, :, heads], *(x[:, :, kv] for x in CASE[1:3]))
        alone = ring_attention(*part, mask=mask, bias=bias[:, heads])
        assert torch.equal(out[:, :, heads], alone)


CROSS = {"mask": Mask.causal(20, keys=N)}


@pytest.mark.parametrize(
    ("bias", "options", "kind", "line"),
    [
        (draw(N, N), {}, PlanError, "bias is [40, 40] of torch.float32: it must be numbers of [2 or 1"),
        (draw(1, 3, N, N), {}, PlanError, "bias is [1, 3, 40, 40]"),
        (draw(1, 4, N, 8), {}, PlanError, "of [2 or 1, 4 or 1, 40 or 1, 40]"),
        (draw(1, 4, N, N) > 0, {}, PlanError, "of torch.bool"),
        ([1.0], {}, ConfigError, "bias"),
        (draw(1, 4, N, N), {"kernel": "flash"}, ValueError, "flash"),
        (draw(1, 4, N, N), {"wire": "int8"}, ConfigError, "wire='int8' does not support bias"),
        (draw(1, 4, N, N), {"plan": PLANS["cp 1"].rank_plan(0)}, ConfigError,
            "bias: give the plan of all ranks"),
        (draw(1, 4, 20, N), CROSS, ConfigError, "bias: heads are not exchanged"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(bias, options, kind, line):
    q = CASE.q[:, :20] if options is CROSS else CASE.q
    with pytest.raises(kind) as caught:
        ring_attention(q, *CASE[1:3], bias=bias, **options)
    assert line in str(caught.value) and "\n" not in str(caught.value), caught.value
