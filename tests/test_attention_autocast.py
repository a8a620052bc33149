"""`torch.autocast` around ring attention: the same bits as without it, in forward and backward, for
every way to compute.
"""

from contextlib import nullcontext

import pytest
import torch

from cp_ring import PlanError, ring_attention, shard
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.rings import said

N, H = 32, 4
OPTIONS = {
    "cpu": {},
    "reference": {"kernel": "reference"},
    "sink": {"sink": True},
    "int8": {"wire": "int8"},
    "heads": {"heads": 2},
    "documents": {"cu_seqlens": [0, 11, N]},
}


def gradients(group, tensors, options, forward, backward):
    """Out and gradients, where forward and backward run under autocast if they are true."""
    leaves = [x.detach().requires_grad_() for x in tensors[:-1]]
    options = dict(options)
    if options.pop("sink", None):
        leaves.append(torch.linspace(-1, 1, H, requires_grad=True))
        options["sink"] = leaves[-1]
    with torch.autocast("cpu", torch.bfloat16) if forward else nullcontext():
        out = ring_attention(*leaves[:3], group=group, causal=True, **options)
    with torch.autocast("cpu", torch.bfloat16) if backward else nullcontext():
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[-1])]


@pytest.mark.parametrize("forward, backward", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits_as_without(name, dtype, forward, backward):
    case = Case.draw(N, h=H, g=2, dtype=dtype)

    def one_rank(group):
        mine = shard(tuple(case), None, group)
        with_it, without = (
            gradients(group, mine, OPTIONS[name], *on)
            for on in ((forward, backward), (False, False))
        )
        return all(
            torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(with_it, without, strict=True)
        )

    assert LocalRing(2).run(one_rank) == [True, True]


def test_different_dtypes_are_cast_to_that_of_autocast():
    """As scaled_dot_product_attention casts them; gradients have the dtypes of the inputs."""
    q, k, v, dout = Case.draw(N, h=H, g=H)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(*leaves, causal=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=True
        )
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(out, ring_attention(*(x.bfloat16() for x in leaves), causal=True))
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert [x.dtype for x in grads] == [torch.float32, torch.float32, torch.bfloat16]
    assert "must share one floating-point dtype" in said(ring_attention, *leaves, causal=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanError, match="must share one floating-point dtype"),
    ):
        ring_attention(q.double(), k, v, causal=True)
