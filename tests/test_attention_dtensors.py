"""DTensors as inputs of `ring_attention`, on real processes, against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cp_ring import Layout, Mask, ring_attention
from cp_ring.testing.oracle import Case, brute_force
from tests.rings import FLOAT32, off

N = 22  # torch gives the last rank of four 4 tokens, the others 6
CASE = Case.draw(N, b=2, h=4, g=2, d=8, e=12)
DIMS = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}


def formed(x: torch.Tensor, form: str) -> torch.Tensor:
    return x.permute(*(DIMS[form].index(i) for i in range(3)), 3)


def on_mesh(group, shape, placements, form="bshd", **options):
    """Out and gradients whole, lse, and how out and dq are placed; [b, s, h, d]."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(shape))
    placed = [place if isinstance(place, Replicate) else Shard(place) for place in placements]
    q, k, v, dout = (distribute_tensor(formed(x, form), mesh, placed) for x in CASE)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(*leaves, causal=True, qkv_format=form, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    assert isinstance(out, DTensor) and out.placements == grads[0].placements == tuple(placed)
    for x in (out, lse):
        assert x.stride() == torch.empty(x.shape).stride() == x.full_tensor().stride()
    back = [formed(x.full_tensor().detach(), form) for x in (out, *grads)]
    return [*back, lse.full_tensor().detach()]


@pytest.mark.parametrize(
    ("shape", "placements", "form"),
    [
        ((4,), (1,), "bshd"),
        ((2, 2), (0, 1), "bshd"),
        ((2, 2), (1, 2), "bshd"),
        ((2, 2), (0, 1), "sbhd"),  # tokens on the first dimension of the mesh
        ((2, 2), (Replicate(), 2), "bhsd"),
    ],
)
def test_equal_brute_force(pool, shape, placements, form):
    wanted = brute_force(CASE, Mask.causal(N).dense())
    for found in pool.run(on_mesh, 4, shape, placements, form):
        *results, lse = found
        assert off(results, wanted) < FLOAT32 and lse.shape == (2, 4, N)
    scores = torch.einsum("bqhd,bkhd->bhqk", CASE.q, CASE.k.repeat_interleave(2, 2)) * 8**-0.5
    hidden = ~torch.from_numpy(Mask.causal(N).dense())
    assert off([lse], [scores.double().masked_fill(hidden, -torch.inf).logsumexp(-1)]) < FLOAT32


def lines(group):
    """Of calls that no rank makes."""
    mesh, other = (DeviceMesh("cpu", torch.arange(4).view(shape)) for shape in ((2, 2), (4,)))
    q, k, v, _ = (distribute_tensor(x, mesh, [Shard(0), Shard(1)]) for x in CASE)
    heads = [x.redistribute(placements=[Shard(0), Shard(2)]) for x in (q, k, v)]
    calls = [
        lambda: ring_attention(q, k, CASE.v),
        lambda: ring_attention(*heads),
        lambda: ring_attention(q, k, heads[2]),
        lambda: ring_attention(q, k, distribute_tensor(CASE.v, other, [Shard(1)])),
        lambda: ring_attention(q, k, v, other),
        lambda: ring_attention(q, k, v, layout=Layout.zigzag(N, 4)),
        lambda: ring_attention(*(distribute_tensor(x[:, :5], other, [Shard(1)]) for x in CASE[:3])),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_others_are_one_line_on_every_rank(pool):
    first, *others = pool.run(lines, 4)
    assert all(each == first for each in others)
    for line, words in zip(
        first,
        (
            "q, k and v must all be DTensors, or none; here q (Shard(dim=0), Shard(dim=1))",
            "q, k and v must be placed alike on one mesh, with S(1), their tokens",
            "v (Shard(dim=0), Shard(dim=2))",
            "q, k and v must be placed alike on one mesh",
            "group is not that of dimension 1 of the mesh",
            "layout is for 4 ranks, but the group has 2",
            "each rank must hold at least one token",
        ),
        strict=True,
    ):
        assert words in line and "\n" not in line, line


def keys_of_their_own(group):
    mesh = DeviceMesh("cpu", torch.arange(4))
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in (CASE.q[:, :11], *CASE[1:3]))
    return ring_attention(q, k, v, causal=True).full_tensor()


def test_keys_of_their_own(pool):
    few = Case(CASE.q[:, :11], *CASE[1:3], CASE.dout[:, :11])
    wanted = brute_force(few, Mask.causal(11, keys=N).dense()).out
    for found in pool.run(keys_of_their_own, 4):
        assert off([found], [wanted]) < FLOAT32
