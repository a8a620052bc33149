"""ring_attention within torch.compile, and tensors that a caller changes or pads."""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention, roll, shard, unshard
from cp_ring.attention import AttentionOptions, Inputs, KeptOutput, attention_of
from cp_ring.testing.local_ring import LocalRing


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss(x, window):
    y = shard(x * 2, None)
    y = ring_attention(y, y, y, None, causal=True, window_size=(window, 0))
    return (roll(unshard(y), -1) * 3).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_first_call_of_a_plan_may_be_in_a_compiled_region(backend):
    window = {"eager": 11, "aot_eager": 12}[backend]  # a plan that no other test has made
    results = []
    for function in (torch.compile(loss, backend=backend), loss):
        x = torch.randn(1, 32, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        value = function(x, window)
        value.backward()
        results.append((value.detach(), x.grad))
    for compiled, plain in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


def test_results_that_are_kept_do_not_change_with_the_callers_tensors():
    plan = Plan.build(Mask.causal(16), Layout.zigzag(16, 1))
    q, k, v = torch.randn(3, 1, 16, 2, 8)
    inputs = Inputs(q, k, v)
    attention = attention_of(plan, None, AttentionOptions(), inputs)
    with torch.no_grad():
        output = attention(inputs)
    kept, expected = KeptOutput.of(output), (output.out.clone(), output.lse.clone())
    output.out.zero_()
    output.lse.zero_()
    again = attention(Inputs(q.requires_grad_(), k, v), kept)
    assert all(torch.equal(x, y) for x, y in zip(again[:2], expected, strict=True))


@pytest.mark.parametrize("cp", [1, 2])
def test_the_gradient_of_a_sink_does_not_read_the_gradients_of_padding(cp):
    plan = Plan.build(Mask.documents([0, 5, 12], n=16), Layout.contiguous(16, cp))

    def case(group, padding):
        mine = plan.layout.positions(group.rank if cp > 1 else 0)
        q, k, v, dout = torch.randn(4, 1, 16, 2, 8, generator=torch.Generator().manual_seed(0))[
            :, :, mine
        ]
        dout[:, mine >= 12] = padding
        sink = torch.ones(2, requires_grad=True)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        ring_attention(q, k, v, group, plan=plan, sink=sink).backward(dout)
        return [sink.grad, q.grad, k.grad, v.grad]

    ring = LocalRing(cp) if cp > 1 else None
    got, expected = (ring.run(case, x) if ring else [case(None, x)] for x in (float("nan"), 0.0))
    for rank in range(cp):
        assert all(torch.equal(x, y) for x, y in zip(got[rank], expected[rank], strict=True))
