"""shard, unshard and roll, against the whole tensor on one rank."""

from functools import partial

import pytest
import torch

from cp_ring import Layout, Mask, Plan, roll, shard, unshard
from cp_ring.plan.moves import Moves
from cp_ring.plan.proof import Axis, check_moves
from cp_ring.testing.local_ring import LocalRing
from tests.rings import said

N = 48


def layouts(cp):
    uneven = Mask.documents([0, 5, 31, N + 1])
    return {
        "zigzag": None,
        "contiguous": Layout.contiguous(N, cp),
        "uneven": Layout.balanced(uneven, cp),
    }


def whole(layout, *shape):
    n = N if layout is None else layout.n
    return torch.randn(
        2, n, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def test_shard_takes_tensors_tuples_dicts_and_plans():
    x = whole(None, 3)
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 2))

    def case(group):
        mine = plan.layout.shard(x, group.rank, 1)
        assert torch.equal(shard(x, plan, group), mine)
        assert torch.equal(shard(x, None, group), mine)
        tokens, nothing = shard((x, None), None, group)
        assert torch.equal(tokens, mine) and nothing is None
        (tokens,) = shard([x.transpose(0, 1)], None, group, dim=0)
        assert torch.equal(tokens, mine.transpose(0, 1))
        assert torch.equal(shard({"labels": x}, None, group)["labels"], mine)
        return True

    assert all(LocalRing(2).run(case))
    assert torch.equal(shard(x), x) and torch.equal(unshard(x), x)


def _model(group, x, weight, layout, reduction):
    """The whole output; and this rank's gradients of x and of a weight that all ranks share, of a
    loss that every rank computes as a whole ("mean"), or its part of it ("sum").
    """
    part = shard(x, layout, group).detach().requires_grad_()
    weight = weight.clone().requires_grad_()
    everything = unshard(torch.tanh(part * weight), layout, group, reduction=reduction)
    loss = (everything * torch.linspace(1, 2, everything.shape[1], dtype=x.dtype)[:, None]).square()
    if reduction == "sum" and group is not None:
        loss = loss * (torch.arange(loss.shape[1]) % group.size() == group.rank())[:, None]
    (loss.sum() / everything.numel()).backward()
    return everything.detach(), part.grad, weight.grad


@pytest.mark.parametrize("name", layouts(2))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cp", [2, 4])
def test_a_loss_of_the_whole_tensor_has_the_gradient_of_one_rank(pool, cp, reduction, name):
    layout = layouts(cp)[name]
    x = whole(layout, 3)
    weight = torch.tensor([0.3, -1.0, 0.7], dtype=x.dtype)
    full, dx, dweight = _model(None, x, weight, None, reduction)
    parts = pool.run(_model, cp, x, weight, layout, reduction)
    assert all(torch.equal(part[0], full) for part in parts)
    made = layout or Layout.zigzag(N, cp)
    assert torch.allclose(made.unshard([part[1] for part in parts], 1), dx, rtol=1e-12)
    assert torch.allclose(sum(part[2] for part in parts), dweight, rtol=1e-12)


def _roll(group, x, shift, layout, options):
    part = shard(x, layout, group).detach().requires_grad_()
    rolled = roll(part, shift, layout, group, **options)
    (gradient,) = torch.autograd.grad((rolled * rolled.detach()).sum(), part)
    return rolled.detach(), gradient


@pytest.mark.parametrize("name", layouts(2))
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_roll_equals_torch(pool, cp, name):
    layout = layouts(cp)[name]
    made = layout or Layout.zigzag(N, cp)
    x = whole(layout, 2)
    ends = torch.tensor([0, 5, 6, 6, 31, made.n])
    document = torch.searchsorted(ends, torch.arange(made.n), right=True)
    for shift in (-1, 2, -17):
        truth = torch.roll(x, shift, 1)
        same = torch.roll(document, shift) == document
        crossed = torch.arange(made.n) - shift
        same &= (crossed >= 0) & (crossed < made.n)
        for options, wanted, gradient in (
            ({}, truth, x),
            ({"cu_seqlens": ends, "fill": -100.0}, truth.masked_fill(~same[:, None], -100.0), None),
        ):
            parts = pool.run(_roll, cp, x, shift, layout, options)
            assert torch.equal(made.unshard([part[0] for part in parts], 1), wanted)
            back = torch.roll(
                wanted.masked_fill(~same[:, None], 0.0) if gradient is None else wanted, -shift, 1
            )
            assert torch.equal(made.unshard([part[1] for part in parts], 1), back)


@pytest.mark.parametrize(
    "line, wrong",
    [
        ("layout is of type Mask: it must be a Layout or a Plan or a name or None",
         lambda x: shard(x, Mask.causal(N))),
        ("rank 0 holds 40 tokens of the layout, but dimension 1 of the tensor has 48",
         lambda x: unshard(x, Layout.zigzag(40, 1))),
        ("cu_seqlens must end at the 48 tokens of the whole sequence",
         lambda x: roll(x, -1, cu_seqlens=[0, 40])),
        ("dim 1.0 is not a whole number", lambda x: shard(x, dim=1.0)),
        ("dim True is not a whole number", lambda x: unshard(x, dim=True)),
        ("shift 1.5 is not a whole number", lambda x: roll(x, 1.5)),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(line, wrong):
    assert line in said(wrong, whole(None))


@pytest.mark.parametrize("dim", [2, -3, 2**63, 2**64])
@pytest.mark.parametrize("call", [shard, unshard, partial(roll, shift=1)])
def test_a_dimension_that_is_not_there_is_one_line(call, dim):
    assert "dim=" in said(call, whole(None), dim=dim)


@pytest.mark.parametrize("shift", [0, 1, -1, 7, -(N // 2), N - 1])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_moves_of_a_roll_are_proven(cp, shift):
    for layout in (Layout.zigzag(N, cp), layouts(cp)["uneven"], Layout.contiguous(47, cp)):
        moves = Moves.rolled(layout, shift)
        axis = Axis(layout)
        check_moves(moves, axis, axis, shift)
        assert len(moves.tokens) <= 2 * len(layout.owner) + 1
        assert said(check_moves, moves, axis, axis, shift + 1).startswith("moves: ")
