"""Recomputed activations: the ring does not run twice, gradients do not change, and nothing is kept
for longer than needed.
"""

import gc

import pytest
import torch

from cp_ring.megatron.adapter import recomputation
from cp_ring.megatron.wrapping import around
from cp_ring.observe.counters import record
from tests.megatron.layers import configuration, core_attention

LAYERS, HIDDEN, HEADS, TOKENS, ROWS = 4, 32, 4, 16, 2
FULL = {
    "uniform": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers in a block": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "three of four layers": {"recompute_method": "block", "recompute_num_layers": 3},
}
KINDS = {name: {"recompute_granularity": "full", **method} for name, method in FULL.items()}
KINDS["selective"] = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
# Kept layers of each kind; each keeps out and lse in float32.
KEPT = {"uniform": 4, "two layers in a block": 4, "three of four layers": 3, "selective": 4}
BYTES = ROWS * TOKENS * (HIDDEN + HEADS) * 4


def build(**values):
    """A GPT model with windows on alternate layers, learned sinks, and dropout outside attention;
    the same one every time.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = configuration(
        num_layers=LAYERS, hidden_dropout=0.2, softmax_type="learnable", window_size=(5, 0),
        window_attn_skip_freq=2, **values,
    )  # fmt: skip
    torch.manual_seed(3)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=TOKENS)


def batches():
    torch.manual_seed(11)
    return [torch.randint(64, (ROWS, TOKENS)) for _ in range(2)]


def forward(model, tokens):
    positions = torch.arange(TOKENS).expand(ROWS, -1)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()


def kept_bytes():
    """Bytes of out and lse that calls which are alive keep for later recomputations."""
    gc.collect()
    calls = [each for each in gc.get_objects() if type(each) is recomputation.KeptCall]
    kept = [out for call in calls for queue in call._kept.values() for out in queue]
    return sum(x.nbytes for out in kept for part in out.parts for x in part)


def step(model):
    """Both microbatches forward, then backward in the other order, as a pipeline may; loss,
    gradients, hops, bytes kept.
    """
    torch.manual_seed(5)
    with record() as ledger:
        losses = [forward(model, tokens) for tokens in batches()]
        kept = kept_bytes()
        for loss in reversed(losses):
            loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return torch.stack(losses).detach(), grads, ledger.hops, kept


@pytest.fixture
def ring(applied, one_rank):
    applied("core_attention", "recompute")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_hops_are_those_without_recomputation(ring, kind):
    losses, grads, hops, kept = step(build())
    assert kept == 0 and hops == 2 * 2 * LAYERS  # microbatches, forward and backward
    model = build(**KINDS[kind])
    found = step(model)
    assert found[2] == hops and found[3] == 2 * KEPT[kind] * BYTES
    assert torch.equal(found[0], losses)
    assert all(torch.equal(found[1][name], grad) for name, grad in grads.items())
    assert kept_bytes() == 0
    model.eval()
    with torch.no_grad():
        forward(model, batches()[0])
        assert kept_bytes() == 0
    model.train()
    assert torch.equal(step(model)[0], losses)


def test_a_failed_step_leaves_nothing_behind(ring):
    model = build(**KINDS["two layers in a block"])
    right = step(model)

    def fail(*_):
        raise RuntimeError("planted")

    hook = model.decoder.layers[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        forward(model, batches()[0])  # the first block is done, the second one is not
    hook.remove()
    loss = forward(model, batches()[0])
    hook = loss.grad_fn.register_prehook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    del loss, hook
    assert kept_bytes() == 0
    again = step(model)
    assert again[2:] == right[2:] and torch.equal(again[0], right[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in right[1].items())


@pytest.mark.parametrize(
    "reentrant, hops, kept",
    [(True, 2, ROWS * TOKENS * (HIDDEN * 2 + HEADS * 4)), (False, 3, 0)],
)
def test_any_reentrant_checkpoint_in_bfloat16(one_rank, reentrant, hops, kept):
    """TransformerEngine's checkpoint is reentrant too; another kind is right, but replays the ring."""
    checkpoint = around(recomputation.keeping)(
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=reentrant)
    )
    layer, shape = core_attention(), (TOKENS, ROWS, HEADS, HIDDEN // HEADS)
    q = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(q, q, q).square().sum(), q)
    with record() as ledger:
        out = checkpoint(lambda q: layer(q, q, q), q)
        assert kept_bytes() == kept
        out.square().sum().backward()
    assert ledger.hops == hops and kept_bytes() == 0
    assert torch.equal(q.grad, wanted)


def test_the_patch_finds_every_checkpoint(applied, monkeypatch):
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_layer

    monkeypatch.setattr(moe_layer, "te_checkpoint", transformer_engine.te_checkpoint, raising=False)
    stock, stock_te = random.checkpoint, transformer_engine.te_checkpoint
    applied("recompute")
    assert random.checkpoint is tensor_parallel.checkpoint is not stock
    assert transformer_engine.te_checkpoint is moe_layer.te_checkpoint is not stock_te
    assert (
        random.checkpoint.__wrapped__ is stock and moe_layer.te_checkpoint.__wrapped__ is stock_te
    )
