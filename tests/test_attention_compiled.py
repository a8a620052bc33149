"""ring_attention within torch.compile, and tensors that a caller changes or pads."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cp_ring import Layout, Mask, Plan, ring_attention, roll, shard, unshard
from cp_ring.attention import attention_of
from cp_ring.inputs import AttentionOptions, Inputs, KeptOutput
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


def graphs(function, **options):
    """`function` compiled whole, and the list of the graphs that were made."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, fullgraph=True, backend=backend, **options), made


def results(function, group, options):
    q, k, v = torch.randn(3, 2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2], torch.ones(4))]
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = function(*leaves, group, options)
    grads = torch.autograd.grad((out.sin().sum(), lse.cos().sum()), leaves)
    return [out.detach(), lse.detach(), *grads]


def layer(q, k, v, sink, group, options):
    return ring_attention(2 * q, 2 * k, v, group, sink=sink, return_lse=True, **options)


def compare(group, cases):
    """Of each case, how many graphs were made for four steps, and whether all results are those of
    the call without a graph.
    """
    torch.compiler.reset()
    found = []
    for options in cases:
        compiled, made = graphs(layer)
        equal = True
        for step in range(4):
            given = {
                name: value[step] if isinstance(value, list) else value
                for name, value in options.items()
            }
            pairs = zip(*(results(f, group, given) for f in (compiled, layer)), strict=True)
            equal &= all(torch.equal(x, y) for x, y in pairs)
        found.append((len(made), equal))
    return found


def of_steps(cp):
    return [Mask.documents([0, 5 + step, 16 * cp]) for step in range(4)]


@pytest.mark.parametrize("case", ["masks", "sbhd", "offsets"])
def test_a_call_is_one_operator_of_a_graph(case):
    """One graph serves masks of all steps; the second one has numbers in their place."""
    options = {
        "masks": {"mask": of_steps(1)},
        "sbhd": {"qkv_format": "sbhd", "window_size": (1, 0)},
        "offsets": {"causal": True, "cu_seqlens": [(0, 5 + step, 16) for step in range(4)]},
    }[case]
    ((made, equal),) = compare(None, [options])
    assert equal and made <= 2


@pytest.mark.ci
def test_ranks_make_calls_in_graphs(pool):
    """With an exchange of heads and with batch rows of their own, where backward computes forward
    again.
    """
    rows = Layout.batch([Layout.zigzag(32, 2)] * 2)
    masks = [Mask.batch([mask, Mask.causal(32)]) for mask in of_steps(2)]
    cases = [
        {"causal": True},
        {"mask": of_steps(2), "layout": "balanced"},
        {"causal": True, "heads": 2},
        {"mask": masks, "layout": rows},
    ]
    for found in pool.run(compare, 2, cases):
        assert all(equal and made <= 2 for made, equal in found), found


def test_a_policy_of_checkpoints_names_the_operator():
    called = []

    def policy(_, op, *args, **kwargs):
        called.append(op)
        kept = op == torch.ops.cp_ring.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return ring_attention(x.sin(), x, x, causal=True).cos()

    def model(x):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    compiled, made = graphs(model)
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, wanted)
    assert torch.ops.cp_ring.attention.default in called and len(made) == 1


def test_tensors_among_the_options_break_the_graph():
    def call(x, ends):
        return ring_attention(x, x, x, cu_seqlens=ends, causal=True)

    x, ends = torch.randn(1, 16, 2, 8), torch.tensor([0, 5, 16])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call, backend="eager", fullgraph=True)(x, ends)
    assert torch.equal(torch.compile(call, backend="eager")(x, ends), call(x, ends))


def test_copies_have_numbers_of_their_own():
    mask = Mask.causal(8)
    others = [
        copy.copy(mask),
        copy.deepcopy(mask),
        pickle.loads(pickle.dumps(mask)),
        Mask.causal(8),
    ]
    assert len({each.number for each in (mask, *others)}) == 5
    assert all(type(mask).of(each.number) is each for each in others)
