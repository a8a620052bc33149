"""The conformance suite passes our kernels and catches planted faults by name."""

import math
from types import SimpleNamespace

import pytest
import torch

from cp_ring.kernels.base import OPEN
from cp_ring.kernels.cpu import KERNEL as CPU
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.reference import ReferenceKernel
from tests import conformance

FEW = {"heads": conformance.HEADS[1:3]}


@pytest.mark.parametrize("prop", conformance.PROPERTIES)
@pytest.mark.parametrize(
    "kernel, dtype, more",
    [(CPU, torch.float32, {}), (CPU, torch.bfloat16, {}), (REFERENCE, torch.float32, FEW)],
)
def test_kernels_of_the_cpu(kernel, dtype, more, prop):
    conformance.check(kernel, "cpu", dtype, only=prop, **more)


def fault(forward=lambda kernel, call, *x, **options: call(*x, **options), **methods):
    """The reference kernel with one thing wrong."""

    def wrong(self, *args, **options):
        return forward(self, ReferenceKernel.forward.__get__(self), *args, **options)

    return type("Faulty", (ReferenceKernel,), {"name": "faulty", "forward": wrong, **methods})()


def base_2(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    return out, lse / math.log(2)


def no_window(kernel, call, q, k, v, *, lo, hi, scale):
    return call(q, k, v, lo=-OPEN, hi=hi, scale=scale)


def unwritten(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    fresh = torch.empty_like(out)
    fresh[:, :-1] = out[:, :-1]
    return fresh, lse


def top_left_varlen(self, q, k, v, packing, scale):
    """Counts the window from the tiles' first corner."""

    def forward(q, k, v, *, lo, hi, scale):
        corner = k.shape[1] - q.shape[1]
        lo, hi = (side if abs(side) == OPEN else side - corner for side in (lo, hi))
        return REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)

    tiles = SimpleNamespace(forward=forward)
    return ReferenceKernel.forward_varlen(tiles, q, k, v, packing, scale)


def own_lse_backward(self, dout, q, k, v, out, lse, *, lo, hi, scale):
    """Computes its own softmax statistics instead of the merged ones."""
    own_out, own_lse = REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)
    return REFERENCE.backward(dout, q, k, v, own_out, own_lse, lo=lo, hi=hi, scale=scale)


@pytest.mark.parametrize(
    "kernel, prop, says",
    [
        (fault(base_2), "full rectangles", "lse of a .* is off by"),
        (fault(no_window), "bands", "is off by|-inf in other rows"),
        (fault(unwritten), "every element written", "out of a .* has NaN"),
        (fault(forward_varlen=top_left_varlen), "varlen", "is off by"),
        (fault(backward=own_lse_backward), "merged backward", "of two tiles is off by"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_planted_fault_is_caught(kernel, prop, says):
    with pytest.raises(AssertionError, match=rf"faulty, {prop}: .*({says})"):
        conformance.check(kernel, "cpu", torch.float64, only=prop, heads=[(4, 2, 16, 24)])
