"""Saved tensors in host memory, where Megatron moves them there: the same bits."""

import pytest
import torch

from tests.megatron import host_memory
from tests.megatron.test_recompute import (
    HEADS,
    HIDDEN,
    LAYERS,
    ROWS,
    TOKENS,
    batches,
    build,
    forward,
)
from tests.rings import same_bits

LAYER = ROWS * TOKENS * (4 * HIDDEN + HEADS) * 4  # q, k, v, out and lse in float32


@pytest.fixture
def ring(applied, one_rank):
    applied("core_attention", "recompute")


def steps(model, after=lambda: None):
    """Losses and gradients of two steps of two microbatches each; `after` ends a step, as
    Megatron's schedule does.
    """
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        for tokens in batches():
            loss = forward(model, tokens)
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        model.zero_grad()
        after()
    return found


def test_fine_grained_offloading_of_megatron(ring):
    expected = steps(build())
    with host_memory.fine_grained() as offloading:
        model = build(**host_memory.SETTINGS)
        outs = []
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.register_forward_hook(
                lambda *call: outs.append((call[1][2], call[2]))
            )
        loss = forward(model, batches()[0])
        # The first step moves all layers. Megatron frees the memory of what it has moved, whoever
        # still holds it.
        assert len(outs) == LAYERS and all(x.untyped_storage().nbytes() == 0 for _, x in outs)
        assert all(x.untyped_storage().nbytes() == 0 for x, _ in outs)
        loss.backward()
        offloading.FineGrainedActivationOffloadingInterface.reset_instance()
        model.zero_grad()
        found = steps(model, offloading.FineGrainedActivationOffloadingInterface.reset)
        moved = host_memory.moved_bytes(offloading)
    assert same_bits(found, expected)
    # The last layer stays where it is: its backward follows at once. out is what the output
    # projection saves too.
    projected = ROWS * TOKENS * HIDDEN * 4
    assert moved == {"core_attn": (LAYERS - 1) * LAYER, "attn_proj": (LAYERS - 1) * projected}


def test_offloading_of_transformer_engine_takes_marked_tensors(ring):
    expected = steps(build())
    with host_memory.marked_only() as store:
        model = build(
            cpu_offloading=True, cpu_offloading_num_layers=LAYERS - 1, cpu_offloading_weights=False
        )
        found = steps(model)
    assert same_bits(found, expected)
    head, runs = (TOKENS, ROWS, HEADS, HIDDEN // HEADS), 4 * LAYERS
    assert store.moved.count(head) == 4 * runs and store.moved.count((ROWS, HEADS, TOKENS)) == runs
    # a learned sink is a weight
    assert head not in store.left and store.left.count((HEADS,)) == runs
