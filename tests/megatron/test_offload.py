"""Saved tensors in host memory, by --cp-ring-offload and by Megatron: the same bits, exact bytes,
and the device forgets them.
"""

import gc
import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cp_ring import Options
from cp_ring.megatron import settings
from cp_ring.megatron.layers import layer_offload, recomputation
from tests.megatron import host_memory
from tests.megatron.launch import HERE, attempt
from tests.megatron.test_recompute import (
    BYTES,
    FULL,
    HEADS,
    HIDDEN,
    LAYERS,
    ROWS,
    TOKENS,
    batches,
    build,
    forward,
    step,
)

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
LAYER = ROWS * TOKENS * (4 * HIDDEN + HEADS) * 4  # q, k, v, out and lse in float32


@pytest.fixture
def configured(applied, one_rank):
    """Puts settings in force for models that are built from now on, and restores those before."""
    applied("core_attention", "recompute")
    before = settings.current()
    yield lambda **values: settings.configure(Options.make(enabled=True, **values))
    settings.configure(before)


@no_cuda
@pytest.mark.parametrize("kind", ["none", *FULL])
def test_gradients_are_the_same_bits(configured, kind):
    values = {} if kind == "none" else {"recompute_granularity": "full", **FULL[kind]}
    expected = step(build(**values))
    configured(offload=True)
    found = step(build(**values))
    assert torch.equal(found[0], expected[0]) and found[2:] == expected[2:]
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())
    assert (
        layer_offload.offload().host_bytes(),
        layer_offload.offload().device_bytes(),
        recomputation.kept_bytes(),
    ) == (0, 0, 0)


@no_cuda
def test_bytes_are_those_of_all_layers_in_host_memory_and_of_two_on_the_device(configured):
    configured(offload=True)
    model, store = build(), layer_offload.offload()
    model.zero_grad()
    outs = []
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(
            lambda *call: outs.append(StorageWeakRef(call[2].untyped_storage()))
        )
    store.peak = 0
    loss = forward(model, batches()[0])
    gc.collect()
    assert store.host_bytes() == LAYERS * LAYER and store.device_bytes() == 0
    # the output projection does not hold them either
    assert len(outs) == LAYERS and all(out.expired() for out in outs)
    loss.backward()
    assert store.peak == 2 * LAYER and store.host_bytes() == 0


@no_cuda
def test_recomputed_layers_keep_out_and_lse_in_host_memory(configured):
    configured(offload=True)
    loss = forward(build(recompute_granularity="full", **FULL["uniform"]), batches()[0])
    assert layer_offload.offload().host_bytes() == recomputation.kept_bytes() == LAYERS * BYTES
    loss.backward()
    assert layer_offload.offload().host_bytes() == 0


@no_cuda
def test_nothing_moves_without_gradients(configured):
    configured(offload=True)
    with torch.no_grad():
        forward(build(), batches()[0])
    assert layer_offload.offload().host_bytes() == 0


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


@no_cuda
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"num_query_groups": 2, "qk_layernorm": True}, marks=pytest.mark.slow),
        pytest.param(
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fine_grained_offloading_of_megatron(configured, more):
    configured()
    expected = steps(build(**more))
    with host_memory.fine_grained() as offloading:
        model = build(**more, **host_memory.SETTINGS)
        outs = []
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.register_forward_hook(
                lambda *call: outs.append((call[1][2], call[2]))
            )
        loss = forward(model, batches()[0])
        # The first step moves all layers. Megatron frees the memory of what it has moved, whoever
        # still holds it.
        assert len(outs) == LAYERS and all(x.untyped_storage().nbytes() == 0 for _, x in outs)
        freed = [x.untyped_storage().nbytes() == 0 for x, _ in outs]
        assert all(freed) or (more.get("recompute_modules") and not any(freed))
        loss.backward()
        offloading.FineGrainedActivationOffloadingInterface.reset_instance()
        model.zero_grad()
        found = steps(model, offloading.FineGrainedActivationOffloadingInterface.reset)
        moved = host_memory.moved_bytes(offloading)
    assert len(found) == len(expected) and all(
        torch.equal(x, y) for x, y in zip(found, expected, strict=True)
    )
    # The last layer stays where it is: its backward follows at once. out is what the output
    # projection saves too.
    of_attention = LAYER if not more.get("num_query_groups") else LAYER - ROWS * TOKENS * HIDDEN * 4
    counted = {} if more.get("recompute_modules") else {"core_attn": (LAYERS - 1) * of_attention}
    assert moved == {**counted, "attn_proj": (LAYERS - 1) * ROWS * TOKENS * HIDDEN * 4}


@no_cuda
def test_offloading_of_transformer_engine_takes_marked_tensors(configured):
    configured()
    expected = steps(build())
    with host_memory.marked_only() as store:
        model = build(
            cpu_offloading=True, cpu_offloading_num_layers=LAYERS - 1, cpu_offloading_weights=False
        )
        found = steps(model)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    head, runs = (TOKENS, ROWS, HEADS, HIDDEN // HEADS), 4 * LAYERS
    assert store.moved.count(head) == 4 * runs and store.moved.count((ROWS, HEADS, TOKENS)) == runs
    # a learned sink is a weight
    assert head not in store.left and store.left.count((HEADS,)) == runs


INTERLEAVED = [
    *(
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers",
        "8",
        "--num-virtual-stages-per-pipeline-rank",
        "2",
    ),
    *("--context-parallel-size", "2"),
]
SPLITS = {
    "cp2": (2, ["--context-parallel-size", "2"]),
    "interleaved": (4, INTERLEAVED),
    "a2a": (2, ["--context-parallel-size", "2", "--cp-comm-type", "a2a"]),
}


@no_cuda
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_training_is_the_same_bits(tmp_path, split):
    """As without, by --cp-ring-offload and by Megatron's fine-grained offloading."""
    ranks, flags = SPLITS[split]
    job = ["--cp-ring", "--cp-ring-cpu", "--train-iters", "3", *flags]
    kinds = {
        "plain": job,
        "ours": [*job, "--cp-ring-offload"],
        "fine-grained": [str(HERE / "fine_grained_script.py"), *job],
    }
    found = {name: attempt(ranks, name, line, tmp_path) for name, line in kinds.items()}
    assert [outcome.code for outcome in found.values()] == [0, 0, 0], found["fine-grained"].output
    expected = found.pop("plain")
    assert all(
        (x.losses, x.grad_norms) == (expected.losses, expected.grad_norms) for x in found.values()
    )
    moved = [
        int(count)
        for count in re.findall(r"moved (\d+)", (tmp_path / "fine-grained.log").read_text())
    ]
    assert len(moved) == ranks and all(moved)
