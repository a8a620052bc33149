"""--cp-ring-offload: the same bits, exact bytes, and the device forgets what waits in host memory."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cp_ring import ContextParallelConfig
from cp_ring.megatron import offload, recompute, settings
from tests.megatron.test_recompute import BYTES, FULL, HEADS, HIDDEN, LAYERS, ROWS, TOKENS, batches, build, forward, step

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present")
LAYER = ROWS * TOKENS * (4 * HIDDEN + HEADS) * 4  # q, k, v, out and lse in float32


@pytest.fixture
def configured(applied, one_rank):
    """Puts settings in force for models that are built from now on, and restores those before."""
    applied("core_attention", "recompute")
    before = settings.current()
    yield lambda **values: settings.configure(ContextParallelConfig.make(enabled=True, **values))
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
    assert (offload.offload().host_bytes(), offload.offload().device_bytes(), recompute.kept_bytes()) == (0, 0, 0)


@no_cuda
def test_bytes_are_those_of_all_layers_in_host_memory_and_of_two_on_the_device(configured):
    configured(offload=True)
    model, store = build(), offload.offload()
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
    assert len(outs) == LAYERS and all(out.expired() for out in outs)  # the output projection does not hold them either
    loss.backward()
    assert store.peak == 2 * LAYER and store.host_bytes() == 0


@no_cuda
def test_recomputed_layers_keep_out_and_lse_in_host_memory(configured):
    configured(offload=True)
    loss = forward(build(recompute_granularity="full", **FULL["uniform"]), batches()[0])
    assert offload.offload().host_bytes() == recompute.kept_bytes() == LAYERS * BYTES
    loss.backward()
    assert offload.offload().host_bytes() == 0


@no_cuda
def test_nothing_moves_without_gradients(configured):
    configured(offload=True)
    with torch.no_grad():
        forward(build(), batches()[0])
    assert offload.offload().host_bytes() == 0
