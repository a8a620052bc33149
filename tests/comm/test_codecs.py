"""What travels: every codec keeps the promises of `cp_ring.comm.codecs`, alone and in attention.

A new codec needs no test of its own: its class in `CODECS` and its widths and error in `WIRES` are
enough.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cp_ring import Layout, Mask, Plan
from cp_ring.comm.codecs import CODECS, Decoding, Quantized
from cp_ring.observe.counters import record
from cp_ring.observe.debug import debugging
from cp_ring.plan.sizes.attention_sizes import WIRES, AttentionSizes
from cp_ring.testing.oracle import Case, brute_force, error
from tests.rings import attend, error_of, off

QUANTIZED = [name for name, codec in CODECS.items() if issubclass(codec, Quantized)]
OF_KEYS = ["plain", *QUANTIZED]
"""Codecs that need nothing but keys and values; for latents see `test_latent`."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BYTES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from(
        [
            0.0,
            -0.0,
            1.0,
            1e-45,
            -1e-40,
            6e-8,
            65504.0,
            3.4028234663852886e38,
            math.inf,
            -math.inf,
            math.nan,
        ]
    ),
)


def roundtrip(name, k, v):
    codec = CODECS[name](k, v)
    coded = codec.encode()
    assert all(len(x) == len(k) for x in coded)
    if not isinstance(codec, Decoding):
        return coded[0], coded[1]
    found = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    codec.decode(coded, *found)
    return found


def bound(name, x):
    """By how much each element of finite x may be off: the codec's promise, and the rounding to the
    dtype of x.
    """
    top = x.double().abs().amax(-1, keepdim=True)
    scale = (top / CODECS[name].largest).clamp(min=torch.finfo(torch.float32).tiny)
    step = (
        (scale / 2).expand(x.shape)
        if name == "int8"
        else torch.maximum(x.double().abs() / 16, scale * 2**-10)
    )
    return (
        step * (1 + 2**-20)
        + torch.finfo(x.dtype).eps * (top + scale)
        + torch.finfo(x.dtype).smallest_normal
    )


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=4))
@example(data=[[0.0] * 5, [1e-45] * 5, [3.4028234663852886e38] * 5, [math.nan, 1.0, 1.0, 1.0, 1.0]])
def test_each_token_is_as_near_as_promised(name, dtype, data):
    x = torch.tensor(data, dtype=torch.float64).to(dtype)[:, None, None]
    k, v = x[..., :3].contiguous(), x[..., 3:].contiguous()
    for given_x, found in zip((k, v), roundtrip(name, k, v), strict=True):
        finite = given_x.float().isfinite().all(-1, keepdim=True).expand_as(given_x)
        assert found[~finite].isnan().all()  # all elements of that token, and of no other
        off = (found.double() - given_x.double()).abs()
        assert (off[finite] <= bound(name, given_x.where(finite, torch.zeros(())))[finite]).all()


PLANS = {
    "causal": Plan.build(Mask.causal(96), Layout.zigzag(96, 3)),
    "full, one source a hop": Plan.build(Mask.full(96), Layout.zigzag(96, 4), schedule="ring"),
    "window": Plan.build(Mask.causal(96, (20, 0)), Layout.contiguous(96, 4)),
    "documents, passed on": Plan.build(
        Mask.documents([0, 7, 50, 51, 96]), Layout.zigzag(96, 4), route="ring", schedule="ring"
    ),
    "heads": Plan.build(Mask.causal(96), Layout.zigzag(96, 4), ulysses=2),
}


@pytest.mark.parametrize("name", OF_KEYS)
@pytest.mark.parametrize("shape", PLANS)
def test_attention_is_as_near_as_promised(name, shape):
    plan, case = PLANS[shape], Case.draw(96, b=2, e=12)
    with debugging():
        results = attend(case, plan, wire=name)
    assert error_of(results, case, plan.mask) < WIRES[name].error + 1e-6


@pytest.mark.parametrize("name", OF_KEYS)
def test_forward_and_backward_use_the_same_keys(name):
    """dq and out are those of attention in which each rank sees other ranks' keys as they were
    decoded.
    """
    plan = Plan.build(Mask.full(64), Layout.contiguous(64, 2))
    case = Case.draw(64, dtype=torch.float64)
    out, dq, _, _ = attend(case, plan, wire=name)
    first = [x.transpose(0, 1).contiguous() for x in (case.k, case.v)]
    k, v = (x.transpose(0, 1) for x in roundtrip(name, *first))
    for rank in range(2):
        mine = slice(32 * rank, 32 * rank + 32)
        seen_k, seen_v = k.clone(), v.clone()
        seen_k[:, mine], seen_v[:, mine] = case.k[:, mine], case.v[:, mine]
        truth = brute_force(Case(case.q, seen_k, seen_v, case.dout), np.ones((64, 64), bool))
        assert error(out[:, mine], truth.out[:, mine]) < 1e-12
        assert error(dq[:, mine], truth.dq[:, mine]) < 1e-12


@pytest.mark.parametrize("name", OF_KEYS)
@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in PLANS if shape != "heads"])
def test_messages_have_the_bytes_of_the_plan(name, dtype, shape):
    plan, case = PLANS[shape], Case.draw(96, b=2, e=24, dtype=dtype)
    sizes = AttentionSizes(4, 2, 16, 24, dtype=BYTES[dtype], batch=2, wire=name)
    report, (keys, gradients) = plan.verify(), sizes.on_wire()
    with record() as all_ranks:
        attend(case, plan, wire=name)
    assert all_ranks.bytes_by_kind["keys"] == 2 * report.keys_out.sum() * keys
    assert all_ranks.bytes_by_kind["gradients"] == report.grads_out.sum() * gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", PLANS)
def test_gradients_in_bfloat16(shape, dtype):
    plan, case = PLANS[shape], Case.draw(96, b=2, dtype=dtype)
    truth = brute_force(case, plan.mask.dense())
    results, plain = attend(case, plan, wire_dtype="bfloat16"), attend(case, plan)
    assert torch.equal(results[0], plain[0]) and results[2].dtype == dtype
    assert off(results[2:], truth[2:]) < 1e-2
