"""ring_attention against brute force in float64, on real processes."""

import math
import re
from dataclasses import replace

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError
from cp_ring.kernels import choose, determinism, deterministic
from cp_ring.kernels.cpu import KERNEL
from cp_ring.testing.oracle import Case, on_rank
from tests.rings import FLOAT32, attend, attend_to_shard, error_of, said, same_bits

# Rounding of one kernel call at these sizes; a wrong tile or transfer is off by 0.01 at least.
TOLERANCE = {torch.float64: 1e-12, torch.float32: FLOAT32, torch.bfloat16: 1e-2}


def causal(n, cp, **options):
    return Plan.build(Mask.causal(n), Layout.zigzag(n, cp), **options)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_and_kernels(pool, dtype, kernel):
    case, plan = Case.draw(96, dtype=dtype), causal(96, 3)
    results = attend(case, plan, pool, kernel=kernel)
    assert {x.dtype for x in results} == {dtype}
    assert error_of(results, case, plan.mask) <= TOLERANCE[dtype]


def _kept(group, case, plan):
    """How many numbers autograd keeps for backward, without q, k and v, which a caller holds."""
    q, k, v = (plan.layout.shard(x, group.rank(), 1).requires_grad_() for x in case[:3])
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ring_attention(q, k, v, group, plan=plan)
    own = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    return sum(size for pointer, size in sizes.items() if pointer not in own)


@pytest.mark.parametrize("ulysses, tensors", [(1, 1), (4, 4)])
def test_backward_keeps_inputs_out_and_lse_once(pool, ulysses, tensors):
    """The inputs are the caller's, or where heads are exchanged those that arrived."""
    plan = causal(64, 4, ulysses=ulysses)
    # Fewer key/value heads, where none are exchanged, would show keys that are kept expanded.
    for numbers in pool.run(_kept, 4, Case.draw(64, h=4, g=max(ulysses, 2), d=16), plan):
        assert numbers == 16 * 4 * (tensors * 16 + 1)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_slots_do_not_grow_with_cp(pool, num_slots):
    for cp in (2, 3, 4):
        case, plan = Case.draw(16 * cp), causal(16 * cp, cp, schedule="ring")
        for _, counters in pool.run(on_rank, cp, case, plan, num_slots=num_slots):
            assert counters.slots_peak == min(num_slots, cp - 1)
            assert counters.slots_alive == 0


def _repeat(group, case, plan, **options):
    return [attend_to_shard(group, case, plan, deterministic=True, **options) for _ in range(3)]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("split", [{"route": "direct"}, {"route": "ring"}, {"ulysses": 2}], ids=str)
def test_deterministic_repeats_bit_for_bit(pool, kernel, split):
    """The order in which gradients of many ranks are added is fixed."""
    plan = Plan.build(Mask.documents([0, 5, 61, 128]), Layout.zigzag(128, 4), **split)
    for first, *others in pool.run(_repeat, 4, Case.draw(128, h=12, g=6), plan, kernel=kernel):
        assert all(same_bits(first, other) for other in others)


def test_deterministic_reaches_the_kernel_in_forward_and_backward(monkeypatch):
    """As an argument, or by torch's own switch, as it was when forward ran; nothing is left behind."""
    seen = []
    for name in ("forward", "backward"):
        plain = getattr(KERNEL, name)
        monkeypatch.setattr(
            KERNEL,
            name,
            lambda *a, plain=plain, **b: seen.append(deterministic()) or plain(*a, **b),
        )
    case, plan = Case.draw(16), causal(16, 1)
    for asked, switch, result in (
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ):
        q, k, v = (x.clone().requires_grad_() for x in case[:3])
        torch.use_deterministic_algorithms(switch)
        try:
            out = ring_attention(q, k, v, plan=plan, kernel="cpu", deterministic=asked)
        finally:
            torch.use_deterministic_algorithms(False)
        out.sum().backward()
        assert seen == [result, result]
        assert not deterministic()
        seen.clear()


def test_deterministic_is_rejected_by_kernels_that_do_not_promise_it(monkeypatch):
    plan = causal(16, 1)
    q, k, v, _ = Case.draw(16, d=11)
    monkeypatch.setattr(KERNEL, "capabilities", replace(KERNEL.capabilities, deterministic=False))
    ring_attention(q, k, v, plan=plan, kernel="cpu")
    assert "kernel='cpu': cpu does not give the same bits in every run" in said(
        ring_attention, q, k, v, plan=plan, kernel="cpu", deterministic=True
    )
    assert choose("auto", device=q.device, dtype=q.dtype, d=11, e=11).name == "cpu"
    with determinism(True):
        assert choose("auto", device=q.device, dtype=q.dtype, d=11, e=11).name == "reference"


def test_bad_shapes():
    plan = causal(16, 1)
    q, k, v, _ = Case.draw(16, h=4, g=2, d=8)
    half = [x[:, :8] for x in (q, k, v)]
    bytes_ = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    for tensors, options, says in (
        (half, {}, "rank 0 holds 16 tokens of the layout"),
        ((half[0], k, v), {}, "batch sizes and tokens must agree"),
        ((q[:, :, :0], k, v), {}, "at least one head"),
        ((q[:, :, :3], k, v), {}, "key/value heads must divide query heads"),
        ((q, k.double(), v), {}, "one floating-point dtype"),
        ((q[0], k, v), {}, "4 dimensions"),
        (half, {"plan": causal(16, 2)}, "pass their process group"),
        (bytes_, {"kernel": "cpu"}, "of 16 to 64 bits"),
    ):
        assert re.search(says, said(ring_attention, *tensors, **{"plan": plan} | options))
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(
            ConfigError, match=r"softmax_scale=.*: it must be a finite number above 0"
        ):
            ring_attention(q, k, v, plan=plan, softmax_scale=scale)


def test_batch_rows_are_a_stream_only_where_the_layout_says_so():
    """Two rows of n tokens are not taken for the one sequence of 2 n tokens that the plan is for."""
    q, k, v, _ = Case.draw(16, b=2, h=2, g=2, d=8)
    assert "rank 0 holds 32 tokens of the layout, but q, k and v have 16" in said(
        ring_attention, q, k, v, plan=causal(32, 1)
    )
    assert "batch rows must be split over the same ranks, as many tokens each; here 10; 22" in said(
        Layout.batch, [Layout.zigzag(10, 1), Layout.zigzag(22, 1)]
    )
