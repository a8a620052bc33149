"""What programs do around a call: tensors of collectives that still run, calls in inference mode,
selective checkpoints, compiled autograd.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.autograd import grad
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cp_ring import Layout, ring_attention, roll, shard, unshard
from cp_ring.recurrent.pieces import Pieces
from cp_ring.recurrent.states import StatePassing
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.rings import FLOAT32, same_bits

N, CP = 64, 2
CASE = Case.draw(N, h=4, g=2)


def running(group, x):
    """x as the result of a collective of this rank alone, which nobody has waited for."""
    found = collectives.all_reduce(x.clone(), "sum", group)
    assert type(found).__name__ == "AsyncCollectiveTensor"
    return found


def of_running_collectives(group, options):
    """Whether each result equals that of plain tensors."""
    alone = [dist.new_group([rank]) for rank in range(group.size())]
    run = partial(running, alone[group.rank()])
    *parts, dout = shard(tuple(CASE), None, group)

    def attention(wrap):
        leaves = [x.clone().requires_grad_() for x in parts]
        out = ring_attention(*map(wrap, parts), group, causal=True, **options)
        grads = grad(ring_attention(*leaves, group, causal=True, **options), leaves, wrap(dout))
        return torch.as_tensor(out + 0), *grads

    def pieces(wrap):
        leaf = parts[1].clone().requires_grad_()
        whole = unshard(leaf, None, group)
        (back,) = grad(whole, leaf, wrap(torch.ones_like(whole)))
        return unshard(wrap(leaf.detach()), None, group), roll(wrap(dout), -1, None, group), back

    plain = [*attention(lambda x: x), *pieces(lambda x: x)]
    found = [*attention(run), *pieces(run)]
    for each in alone[group.rank() : group.rank() + 1]:
        dist.destroy_process_group(each)
    return same_bits(found, plain)


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"wire": "int8"}], ids=str)
def test_tensors_of_collectives_that_still_run_are_waited_for(pool, options):
    assert all(pool.run(of_running_collectives, 4, options))


def test_a_call_in_inference_mode_leaves_nothing_that_training_cannot_use():
    def case(group):
        (k,) = shard((CASE.k,), None, group)
        layout = Layout.zigzag(N, CP)
        passing = []

        def step(x):
            rolled = roll(x, -1, None, group, cu_seqlens=[0, 9, N - 3, N])
            if not passing:
                passing.append(StatePassing(Pieces.of(layout, [0, 9], [-1, -1]), group, x.device))
            flat = x[0].flatten(1)
            weight = torch.ones(flat.shape[1], 3)
            kernel = partial(torch.nn.functional.conv1d, weight=weight[:, None], groups=len(weight))
            pad = torch.nn.functional.pad
            out = passing[0].convolve(
                lambda y: kernel(pad(y.mT, (2, 0))).mT, flat, weight, None, lambda y: y
            )
            return rolled.sum() + out.sum() + ring_attention(x, x, x, group, causal=True).sum()

        with torch.inference_mode():
            before = step(k)
        leaf = k.clone().requires_grad_()
        loss = step(leaf)
        (gradient,) = grad(loss, leaf)
        assert torch.equal(before, loss) and gradient.isfinite().all()
        return True

    assert all(LocalRing(CP).run(case))


@pytest.mark.parametrize("cp, heads", [(1, 1), (2, 1), (2, 2)])
def test_a_sink_under_a_selective_checkpoint(cp, heads):
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(_, operator, *args, **named):
        keeps = operator is attention
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def case(group):
        *leaves, dout = shard(tuple(CASE), None, group)
        leaves = [x.requires_grad_() for x in (*leaves, torch.zeros(4))]

        def call(q, k, v, sink):
            return ring_attention(q, k, v, group, causal=True, sink=sink, heads=heads) * 2

        out = checkpoint(
            call,
            *leaves,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
        found = grad(out, leaves, dout)
        wanted = grad(call(*leaves), leaves, dout)
        return max(float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))

    assert max(LocalRing(cp).run(case)) < FLOAT32


def test_compiled_autograd_leaves_messages_to_the_host(pool):
    assert all(pool.run(under_compiled_autograd, CP))


def under_compiled_autograd(group):
    """Whether backward of compiled autograd equals that of eager."""
    from torch._dynamo import compiled_autograd

    *parts, dout = shard(tuple(CASE), None, group)

    def gradients():
        leaves = [x.clone().requires_grad_() for x in parts]
        out = ring_attention(*leaves, group, causal=True)
        torch.autograd.backward(out, dout)
        return [x.grad for x in leaves]

    wanted = gradients()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        found = gradients()
    return same_bits(found, wanted)
