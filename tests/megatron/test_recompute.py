"""Recomputed activations: the ring does not run twice, gradients do not change, and nothing is kept
for longer than needed.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from cp_ring.megatron.adapter import recomputation
from cp_ring.observe.counters import record
from tests.kernels.emulated_te import installed

no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU runtime is inert where CUDA is present"
)
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
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.2,
        use_cpu_initialization=True,
        softmax_type="learnable",
        window_size=(5, 0),
        window_attn_skip_freq=2,
        **values,
    )
    torch.manual_seed(3)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=TOKENS)


def batches():
    torch.manual_seed(11)
    return [torch.randint(64, (ROWS, TOKENS)) for _ in range(2)]


def forward(model, tokens):
    positions = torch.arange(TOKENS).expand(ROWS, -1)
    return model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()


def step(model):
    """Both microbatches forward, then backward in the other order, as a pipeline may; loss,
    gradients, hops, bytes kept.
    """
    torch.manual_seed(5)
    with record() as ledger:
        losses = [forward(model, tokens) for tokens in batches()]
        kept = recomputation.kept_bytes()
        for loss in reversed(losses):
            loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return torch.stack(losses).detach(), grads, ledger.hops, kept


@pytest.fixture
def ring(applied, one_rank):
    applied("core_attention", "recompute")


@no_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_hops_are_those_without_recomputation(ring, kind):
    losses, grads, hops, kept = step(build())
    assert kept == 0 and hops == 2 * 2 * LAYERS  # microbatches, forward and backward
    model = build(**KINDS[kind])
    found = step(model)
    assert found[2] == hops and found[3] == 2 * KEPT[kind] * BYTES
    assert torch.equal(found[0], losses)
    assert all(torch.equal(found[1][name], grad) for name, grad in grads.items())
    assert recomputation.kept_bytes() == 0
    model.eval()
    with torch.no_grad():
        forward(model, batches()[0])
        assert recomputation.kept_bytes() == 0
    model.train()
    assert torch.equal(step(model)[0], losses)


@no_cuda
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
    assert recomputation.kept_bytes() == 0
    again = step(model)
    assert again[2:] == right[2:] and torch.equal(again[0], right[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in right[1].items())


@no_cuda
def test_megatron_may_rerun_a_step(ring):
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    machine, model, runs = (
        RerunStateMachine(mode=RerunMode.REPORT_DETERMINISM_STATS),
        build(**KINDS["uniform"]),
        [],
    )
    while machine.should_run_forward_backward(None):
        runs.append(step(model))
        assert recomputation.kept_bytes() == 0
        machine.validate_result(
            result=runs[-1][0].sum(), rejection_func=torch.isnan, message="the loss"
        )
    first, second = runs
    assert first[2:] == second[2:] and torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], grad) for name, grad in second[1].items())


@no_cuda
def test_a_second_backward_pass_replays_the_ring(ring):
    model = build(**KINDS["uniform"])
    with record() as ledger:
        logits = model(batches()[0], torch.arange(TOKENS).expand(ROWS, -1), None)
        loss = logits.square().mean()
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        assert ledger.hops == 2 * LAYERS
        loss.backward()
    assert ledger.hops == 2 * LAYERS + 2 * LAYERS  # the second time nothing is left to take
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def attention():
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.adapter.attention import RingDotProductAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, attention_dropout=0.0
    )
    return RingDotProductAttention(
        config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )


@no_cuda
@pytest.mark.parametrize(
    ("reentrant", "hops", "kept"),
    [(True, 2, ROWS * TOKENS * (HIDDEN * 2 + HEADS * 4)), (False, 3, 0)],
)
def test_any_reentrant_checkpoint_in_bfloat16(one_rank, reentrant, hops, kept):
    """TransformerEngine's checkpoint is reentrant too; another kind is right, but replays the ring."""
    checkpoint = recomputation.keeping(
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=reentrant)
    )
    layer, q = (
        attention(),
        torch.randn(TOKENS, ROWS, HEADS, HIDDEN // HEADS, dtype=torch.bfloat16, requires_grad=True),
    )
    (wanted,) = torch.autograd.grad(layer(q, q, q).square().sum(), q)
    with record() as ledger:
        out = checkpoint(lambda q: layer(q, q, q), q)
        assert recomputation.kept_bytes() == kept
        out.square().sum().backward()
    assert ledger.hops == hops and recomputation.kept_bytes() == 0
    assert torch.equal(q.grad, wanted)


@no_cuda
def test_hidden_dropout_after_a_kernel_that_draws(one_rank):
    """TransformerEngine advances a random generator in forward; skipping that in the second run
    must not change dropout.
    """
    layer, q = (
        attention(),
        torch.randn(TOKENS, ROWS, HEADS, HIDDEN // HEADS, dtype=torch.bfloat16, requires_grad=True),
    )
    grads = []
    for keep, runs in ((False, 2), (True, 1)):
        plain = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        checkpoint = recomputation.keeping(plain) if keep else plain
        torch.manual_seed(7)
        with installed("2.20.2") as calls:
            checkpoint(
                lambda q: torch.nn.functional.dropout(layer(q, q, q), 0.1), q
            ).square().sum().backward()
            assert sum("is_training" in call for call in calls) == runs
        grads.append(q.grad)
        q.grad = None
    assert torch.equal(*grads)


@no_cuda
def test_packed_documents_and_windows(one_rank):
    from megatron.core.packed_seq_params import PackedSeqParams

    layer, q = attention(), torch.randn(TOKENS, HEADS, HIDDEN // HEADS, requires_grad=True)
    layer.window = (3, 0)
    edges = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=11, max_seqlen_kv=11
    )

    def call(q):
        return layer(q, q, q, packed_seq_params=packed)

    (wanted,) = torch.autograd.grad(call(q).square().sum(), q)
    checkpoint = recomputation.keeping(
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True)
    )
    with record() as ledger:
        checkpoint(call, q).square().sum().backward()
    assert ledger.hops == 2 and torch.equal(q.grad, wanted)


@pytest.fixture
def copied_storage(monkeypatch):
    """Megatron compiles a C++ extension that lets one tensor share the storage of another; a copy
    needs no compiler.
    """
    from megatron.core.tensor_parallel import random

    def share_storage(target, source):
        target.untyped_storage().resize_(source.untyped_storage().nbytes())
        target.untyped_storage().copy_(source.untyped_storage())

    monkeypatch.setattr(
        random, "_share_storage_ext", SimpleNamespace(share_storage=share_storage), raising=False
    )


@no_cuda
def test_recomputed_up_projections_of_latent_attention(ring, copied_storage):
    """Megatron frees the storage of queries, keys and values after forward, and fills it again
    before backward.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    def model(**values):
        sizes = {
            "num_layers": 2,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
        }
        sizes |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 12}
        plain = {
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "apply_rope_fusion": False,
        }
        config = MLATransformerConfig(**sizes, **plain, multi_latent_attention=True, **values)
        torch.manual_seed(3)
        spec = get_gpt_layer_local_spec(multi_latent_attention=True)
        return GPTModel(
            config, spec, vocab_size=64, max_sequence_length=TOKENS, position_embedding_type="rope"
        )

    losses, grads, hops, _ = step(model())
    found = step(model(recompute_granularity="selective", recompute_modules=["mla_up_proj"]))
    assert found[2:] == (hops, 0) and torch.equal(found[0], losses)
    assert all(torch.equal(found[1][name], grad) for name, grad in grads.items())


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
