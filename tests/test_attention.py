"""ring_attention against brute force in float64, on real processes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.kernels import choose, determinism, deterministic
from cp_ring.kernels.cpu import KERNEL
from cp_ring.testing.oracle import Case, Grads, brute_force, error, on_rank, whole

MASKS = {"causal": Mask.causal, "full": Mask.full}
LAYOUTS = {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}
# Rounding of one float32 or bfloat16 kernel call at these sizes; a wrong tile or transfer is off by
# 0.01 at least.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def ring(pool, case: Case, plan: Plan, **options) -> Grads:
    return whole(plan.layout, pool.run(on_rank, plan.cp, case, plan, **options))


def close(got: Grads, truth: Grads, tolerance: float) -> None:
    errors = {name: error(x, y) for name, x, y in zip(Grads._fields, got, truth, strict=True)}
    assert all(e <= tolerance for e in errors.values()), errors


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_equals_brute_force(pool, cp, mask, layout):
    n = 48 * cp
    plan = Plan.build(MASKS[mask](n), LAYOUTS[layout](n, cp))
    case = Case.draw(n, b=2, h=6, g=2, d=24)
    close(ring(pool, case, plan), brute_force(case, plan.mask.dense()), TOLERANCE[torch.float32])


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_and_kernels(pool, dtype, kernel):
    plan = Plan.build(Mask.causal(96), Layout.zigzag(96, 3))
    case = Case.draw(96, dtype=dtype)
    got = ring(pool, case, plan, kernel=kernel)
    assert {x.dtype for x in got} == {dtype}
    close(got, brute_force(case, plan.mask.dense()), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("h", "g", "d", "e"),
    [
        (4, 4, 16, 16),
        (8, 1, 8, 8),
        (3, 3, 7, 7),
        (4, 2, 33, 33),
        (4, 2, 24, 16),
        (4, 2, 16, 40),
        (1, 1, 1, 1),
    ],
)
def test_heads_and_head_sizes(pool, h, g, d, e):
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 2))
    case = Case.draw(64, b=2, h=h, g=g, d=d, e=e)
    close(ring(pool, case, plan), brute_force(case, plan.mask.dense()), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "options",
    [{"softmax_scale": 0.5}, {"qkv_format": "sbhd"}, {"num_slots": 3}, {"wire_dtype": "float32"}],
    ids=lambda o: next(iter(o)),
)
def test_options(pool, options):
    plan = Plan.build(Mask.causal(128), Layout.zigzag(128, 4))
    case = Case.draw(128, b=2)
    truth = brute_force(case, plan.mask.dense(), options.get("softmax_scale"))
    close(ring(pool, case, plan, **options), truth, TOLERANCE[torch.float32])


def test_gradcheck():
    plan = Plan.build(Mask.causal(12), Layout.zigzag(12, 1))
    case = Case.draw(12, h=2, g=1, d=4, dtype=torch.float64)
    inputs = tuple(x.requires_grad_() for x in case[:3])
    assert torch.autograd.gradcheck(
        lambda q, k, v: ring_attention(q, k, v, plan=plan, kernel="reference"), inputs
    )


def _kept(group, case, plan):
    """Distinct storages that autograd keeps for backward, and those that a caller holds anyway."""
    q, k, v = (plan.layout.shard(x, group.rank(), 1).requires_grad_() for x in case[:3])
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = tuple(sorted(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = ring_attention(q, k, v, group, plan=plan)
    own = {x.untyped_storage().data_ptr() for x in (q, k, v, out)}
    return len(kept), [shape for pointer, shape in kept.items() if pointer not in own]


def test_backward_keeps_only_inputs_out_and_lse(pool):
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4))
    for count, others in pool.run(_kept, 4, Case.draw(64, h=4, g=2, d=16), plan):
        assert count == 5
        assert others == [(1, 4, 16)]  # lse [b, h, s]


@pytest.mark.parametrize("num_slots", [2, 3])
def test_slots_do_not_grow_with_cp(pool, num_slots):
    for cp in (2, 3, 4):
        n = 16 * cp
        plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp), schedule="ring")
        for _, counters in pool.run(on_rank, cp, Case.draw(n), plan, num_slots=num_slots):
            assert counters.slots_peak == min(num_slots, cp - 1)
            assert counters.slots_alive == 0


def test_transport_moves_the_plans_bytes(pool):
    """What really went out is what the plan says, each way, to the byte."""
    n, g, d = 64, 2, 16
    plan = Plan.build(Mask.causal(n), Layout.zigzag(n, 4))
    for rank, (_, counters) in enumerate(pool.run(on_rank, 4, Case.draw(n, g=g, d=d), plan)):
        hops = plan.rank_plan(rank).hops
        token = 2 * g * d * 4
        keys = sum(send.tokens for hop in hops for send in hop.sends) * token
        gradients = sum(send.tokens for hop in hops for send in hop.grad_sends) * token
        # keys travel forward and again backward
        assert counters.bytes_by_kind == {"keys": 2 * keys, "gradients": gradients}
        arriving = sum(receive.tokens for hop in hops for receive in hop.receives) * 2
        assert (
            counters.bytes_received
            == (arriving + sum(t.tokens for hop in hops for t in hop.grad_receives)) * token
        )


def _repeat(group, case, plan, **options):
    return [on_rank(group, case, plan, **options)[0] for _ in range(3)]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("route", ["direct", "ring"])
def test_deterministic_repeats_bit_for_bit(pool, kernel, route):
    """The order in which gradients of many ranks are added is fixed."""
    plan = Plan.build(Mask.documents([0, 5, 61, 128]), Layout.zigzag(128, 4), route)
    for runs in pool.run(_repeat, 4, Case.draw(128), plan, kernel=kernel, deterministic=True):
        for other in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


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
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    case = Case.draw(16)
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
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    q, k, v, _ = Case.draw(16, d=11)
    monkeypatch.setattr(KERNEL, "capabilities", replace(KERNEL.capabilities, deterministic=False))
    ring_attention(q, k, v, plan=plan, kernel="cpu")
    with pytest.raises(
        KernelError, match=r"kernel='cpu': cpu does not give the same bits in every run"
    ):
        ring_attention(q, k, v, plan=plan, kernel="cpu", deterministic=True)
    assert choose("auto", device=q.device, dtype=q.dtype, d=11, e=11).name == "cpu"
    with determinism(True):
        assert choose("auto", device=q.device, dtype=q.dtype, d=11, e=11).name == "reference"


def _raises(group, case, plan, options):
    try:
        on_rank(group, case, plan, **options)
    except ValueError as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            {"kernel": "warp"},
            KernelError,
            "kernel='warp': unknown; known are auto, transformer_engine, cudnn",
        ),
        ({"num_slots": 1}, ConfigError, "num_slots=1: it must be a whole number from 2 to 8"),
        (
            {"wire_dtype": "int8"},
            ConfigError,
            "wire_dtype='int8': it must be 'input', 'float32' or 'bfloat16'",
        ),
        ({"qkv_format": "thd"}, ConfigError, "qkv_format='thd': it must be 'bshd' or 'sbhd'"),
    ],
)
def test_bad_options(options, kind, says):
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    got, message = _raises(None, Case.draw(16), plan, options)
    assert got is kind
    assert says in message
    assert "\n" not in message


def test_bad_shapes():
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    q, k, v, _ = Case.draw(16, h=4, g=2, d=8)
    with pytest.raises(PlanError, match="rank 0 holds 16 tokens of the layout"):
        ring_attention(q[:, :8], k[:, :8], v[:, :8], plan=plan)
    with pytest.raises(PlanError, match="batch sizes and tokens must agree"):
        ring_attention(q[:, :8], k, v, plan=plan)
    with pytest.raises(PlanError, match="at least one head"):
        ring_attention(q[:, :, :0], k, v, plan=plan)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(
            ConfigError, match=r"softmax_scale=.*: it must be a finite number above 0"
        ):
            ring_attention(q, k, v, plan=plan, softmax_scale=scale)
    with pytest.raises(PlanError, match="key/value heads must divide query heads"):
        ring_attention(q[:, :, :3], k, v, plan=plan)
    with pytest.raises(PlanError, match="one floating-point dtype"):
        ring_attention(q, k.double(), v, plan=plan)
    with pytest.raises(PlanError, match="4 dimensions"):
        ring_attention(q[0], k, v, plan=plan)
    with pytest.raises(PlanError, match="pass their process group"):
        ring_attention(
            q[:, :8], k[:, :8], v[:, :8], plan=Plan.build(Mask.causal(16), Layout.zigzag(16, 2))
        )
    with pytest.raises(PlanError, match="of 16 to 64 bits"):
        ring_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), plan=plan, kernel="cpu")


def test_group_of_another_size(pool):
    plan = Plan.build(Mask.causal(24), Layout.zigzag(24, 3))
    for kind, message in pool.run(_raises, 2, Case.draw(24), plan, {}):
        assert kind is PlanError
        assert "the plan is for 3 ranks, the group has 2" in message


def test_infinite_scores_do_not_leak():
    """Rows that see nothing (padding behind the last document) give out 0 and no gradient, never
    NaN.
    """
    mask = Mask.documents([0, 5, 9], n=12)
    plan = Plan.build(mask, Layout.zigzag(12, 1))
    case = Case.draw(12, h=2, g=1, d=8)
    grads, _ = on_rank(None, case, plan)
    close(grads, brute_force(case, mask.dense()), TOLERANCE[torch.float32])
    assert not any(math.isnan(x.sum()) for x in grads)
    assert all((x[:, 9:] == 0).all() for x in grads)


def _with_sink(group, case, plan, sink):
    q, k, v, dout = (plan.layout.shard(x, group.rank(), 1) for x in case)
    q, k, v, sink = (x.detach().requires_grad_() for x in (q, k, v, sink))
    out = ring_attention(q, k, v, group, plan=plan, sink=sink)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sink), dout)]


@pytest.mark.parametrize("cp", [2, 4])
def test_sink_equals_a_key_without_a_value(pool, cp):
    """A sink is a further key with that score in every row and the value 0: its oracle is autograd
    on just that.
    """
    n = 64
    plan = Plan.build(Mask.documents([0, 20, 50], n=n), Layout.zigzag(n, cp))
    case, sink = Case.draw(n, b=2, h=4, g=2), torch.tensor([-1.0, 0.0, 0.5, 3.0])
    parts = pool.run(_with_sink, cp, case, plan, sink)
    got = [plan.layout.unshard([part[i] for part in parts], 1) for i in range(4)]

    q, k, v, offset = (x.double().requires_grad_() for x in (*case[:3], sink))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 0.25
    scores = scores.masked_fill(~torch.from_numpy(plan.mask.dense()), -math.inf)
    p = torch.cat([scores, offset[:, None, None].expand(2, 4, n, 1)], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bhqk,bkhe->bqhe", p, v.repeat_interleave(2, 2))
    truth = [out, *torch.autograd.grad(out, (q, k, v, offset), case.dout.double())]
    for x, y in zip([*got, sum(part[4] for part in parts)], truth, strict=True):
        assert error(x, y) < TOLERANCE[torch.float32]


def test_queries_of_any_stride():
    """Kernels want the last dimension dense: a transposed view must not reach them."""
    plan = Plan.build(Mask.causal(24), Layout.zigzag(24, 1))
    case = Case.draw(24, b=2, h=4, g=4, d=8)
    strided = Case(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in case))
    assert strided.q.stride(-1) != 1
    close(
        on_rank(None, strided, plan)[0],
        brute_force(case, plan.mask.dense()),
        TOLERANCE[torch.float32],
    )


def test_batch_rows_are_a_stream_only_where_the_layout_says_so():
    """Two rows of n tokens are not taken for the one sequence of 2 n tokens that the plan is for."""
    q, k, v, _ = Case.draw(16, b=2, h=2, g=2, d=8)
    with pytest.raises(
        PlanError, match="rank 0 holds 32 tokens of the layout, but q, k and v have 16"
    ):
        ring_attention(q, k, v, plan=Plan.build(Mask.causal(32), Layout.zigzag(32, 1)))
    with pytest.raises(
        PlanError,
        match="batch rows must be split over the same ranks, as many tokens each; here 10; 22",
    ):
        Layout.batch([Layout.zigzag(10, 1), Layout.zigzag(22, 1)])


def test_a_sink_of_nothing():
    """exp(-inf) is no sink at all, for rows without keys too."""
    plan = Plan.build(Mask.documents([0, 20], n=24), Layout.zigzag(24, 1))
    case = Case.draw(24)
    sink = torch.full((4,), -math.inf, requires_grad=True)
    out = ring_attention(*case[:3], plan=plan, sink=sink)
    assert torch.equal(out, ring_attention(*case[:3], plan=plan))
    assert (torch.autograd.grad(out.sum(), sink)[0] == 0).all()
