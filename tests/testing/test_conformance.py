"""The conformance suite passes our kernels and catches planted faults by name."""

from __future__ import annotations

import math

import pytest
import torch

from cp_ring.kernels.base import OPEN
from cp_ring.kernels.cpu import KERNEL as CPU
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.reference import ReferenceKernel
from tests import conformance


@pytest.mark.parametrize("prop", conformance.PROPERTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernel(prop, dtype):
    conformance.check(CPU, "cpu", dtype, only=prop)


@pytest.mark.parametrize("prop", conformance.PROPERTIES)
def test_reference_kernel(prop):
    conformance.check(REFERENCE, "cpu", torch.float32, only=prop, heads=conformance.HEADS[1:3])


def fault(forward=lambda kernel, call, *x, **options: call(*x, **options), **methods):
    """The reference kernel with one thing wrong."""

    def wrong(self, *args, **options):
        return forward(self, ReferenceKernel.forward.__get__(self), *args, **options)

    return type("Faulty", (ReferenceKernel,), {"name": "faulty", "forward": wrong, **methods})()


def finite_lse(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    return out, lse.masked_fill(lse.isneginf(), 0.0)


def base_2(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    return out, lse / math.log(2)


def bottom_right(kernel, call, q, k, v, *, lo, hi, scale):
    slide = k.shape[1] - q.shape[1] if hi != OPEN else 0
    return call(q, k, v, lo=lo, hi=hi + slide, scale=scale)


def no_window(kernel, call, q, k, v, *, lo, hi, scale):
    return call(q, k, v, lo=-OPEN, hi=hi, scale=scale)


def own_scale(kernel, call, q, k, v, *, lo, hi, scale):
    return call(q, k, v, lo=lo, hi=hi, scale=q.shape[-1] ** -0.5)


def first_head(kernel, call, q, k, v, **options):
    return call(q, k[:, :, :1], v[:, :, :1], **options)


def unwritten(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    fresh = torch.empty_like(out)
    fresh[:, :-1] = out[:, :-1]
    return fresh, lse


def over_reading(kernel, call, q, k, v, **options):
    if k.storage_offset():
        k = k.as_strided(k.shape, k.stride(), k.storage_offset() - k.stride(1))
    return call(q, k, v, **options)


def narrow_lse(kernel, call, *x, **options):
    out, lse = call(*x, **options)
    return out, lse.bfloat16()


def wrong_dense_path(self, dout, q, k, v, out, lse, *, lo, hi, scale):
    """Another function for multiples of 128, which computes its own softmax statistics."""
    if q.shape[1] % 128 == k.shape[1] % 128 == 0:
        return own_lse_backward(self, dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
    return REFERENCE.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)


calls = []


def unsteady(kernel, call, *x, **options):
    calls.append(1)
    out, lse = call(*x, **options)
    return out * (1 + 1e-9 * len(calls)), lse


def top_left_varlen(self, q, k, v, packing, scale):
    """Counts the window from the tiles' first corner."""
    parts = []
    ends = packing.cu_q.tolist(), packing.cu_k.tolist()
    for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        lo, hi = (
            -packing.left if packing.left >= 0 else -OPEN,
            packing.right if packing.right >= 0 else OPEN,
        )
        parts.append(
            REFERENCE.forward(
                q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], lo=lo, hi=hi, scale=scale
            )
        )
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def own_lse_backward(self, dout, q, k, v, out, lse, *, lo, hi, scale):
    """Computes its own softmax statistics instead of the merged ones."""
    own_out, own_lse = REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)
    return REFERENCE.backward(dout, q, k, v, own_out, own_lse, lo=lo, hi=hi, scale=scale)


@pytest.mark.parametrize(
    ("kernel", "prop", "says"),
    [
        (fault(finite_lse), "queries without keys", "lse of a .* is -inf for other queries"),
        (fault(base_2), "natural-log lse", r"natural logarithm times 1\.44"),
        (fault(bottom_right), "bands", "is off by|-inf in other rows"),
        (fault(no_window), "bands", "is off by|-inf in other rows"),
        (fault(own_scale), "scale", "lse of a 33 x 33 tile, band .* is off by"),
        (fault(first_head), "full rectangles", "is off by"),
        (fault(unwritten), "every element written", "out of a .* has NaN"),
        (fault(over_reading), "strided views", "nan|NaN|-inf in other rows"),
        (fault(narrow_lse), "full rectangles", "lse of a .* is torch.bfloat16"),
        (fault(unsteady), "deterministic", "two runs differ"),
        (fault(forward_varlen=top_left_varlen), "varlen", "is off by"),
        (fault(backward=wrong_dense_path), "multiples of 128", "of two tiles is off by"),
        (fault(backward=own_lse_backward), "merged backward", "of two tiles is off by"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_planted_fault_is_caught(kernel, prop, says):
    with pytest.raises(AssertionError, match=rf"faulty, {prop}: .*({says})"):
        conformance.check(kernel, "cpu", torch.float64, only=prop, heads=[(4, 2, 16, 24)])
