"""Which latents Megatron's layers give to core attention, and where their gradients go."""

import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Module, Parameter

from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.adapter.latent_tap import LatentTap, _IntoMainGrad, _normalized, linked
from cp_ring.megatron.flags.codec_choice import choose_wire
from cp_ring.megatron.flags.resolve import accept_complete
from cp_ring.megatron.options import Options
from tests.rings import refused

ALONE = SimpleNamespace(size=lambda: 1)
C, KEY, VALUE, HEADS = 6, 4, 3, 2


class ColumnParallelLinear(Module):
    """A projection as Megatron's: named so, with `config` and `weight`."""

    def __init__(self, **config):
        super().__init__()
        fused = {"gradient_accumulation_fusion": False}
        self.config = SimpleNamespace(sequence_parallel=False, **fused | config)
        self.weight = Parameter(torch.randn(HEADS * (KEY + VALUE), C))

    def forward(self, x):
        return x @ self.weight.T


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, normalization):
        super().__init__()
        self.normalization, self.eps, self.zero_centered_gamma = normalization, 1e-5, True
        self.layer_norm_weight = Parameter(torch.randn(C))
        self.layer_norm_bias = Parameter(torch.randn(C))


class Layer(Module):
    """An attention layer: its core attention takes what the tap saw."""

    def __init__(self, projection):
        super().__init__()
        self.core_attention = SimpleNamespace(tap=LatentTap(ALONE))
        self.linear_kv_up_proj = projection

    def get_query_key_value_tensors(self, x):
        self.linear_kv_up_proj(x)
        return None, None, None, None, x

    def forward(self, x):
        self.get_query_key_value_tensors(x)
        return self.core_attention.tap.take(KEY, VALUE)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_norm_that_is_fused_into_the_projection_is_applied(normalization):
    projection = TELayerNormColumnParallelLinear(normalization)
    x = torch.randn(5, 2, C) * 1
    wide = x.double() - (x.double().mean(-1, keepdim=True) if normalization == "LayerNorm" else 0)
    wide = (
        wide
        / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        * (projection.layer_norm_weight.double() + 1)
    )
    wide = wide + (projection.layer_norm_bias.double() if normalization == "LayerNorm" else 0)
    assert torch.allclose(_normalized(x, projection).double(), wide, atol=1e-5)
    assert torch.allclose(linked(Layer)(projection)(x).latent.double(), wide, atol=1e-5)


def test_the_gradient_of_a_fused_weight_goes_into_main_grad():
    for main in (None, torch.ones(3)):
        weight = Parameter(torch.ones(3, dtype=torch.bfloat16))
        if main is not None:
            weight.main_grad = main
        (2 * _IntoMainGrad.apply(weight)).sum().backward()
        if main is None:
            assert weight.grad.tolist() == [2, 2, 2]
        else:
            assert (
                weight.grad is None and main.tolist() == [3, 3, 3] and main.dtype == torch.float32
            )
    layer = linked(Layer)(ColumnParallelLinear(gradient_accumulation_fusion=True))
    weight = layer.linear_kv_up_proj.weight
    weight.main_grad = torch.zeros_like(weight)
    latents = layer(torch.randn(5, 2, C))
    (latents.key_up.sum() + latents.value_up.sum()).backward()
    assert weight.grad is None and torch.equal(weight.main_grad, torch.ones_like(weight))


def test_another_projection_is_rejected_by_name():
    class LoraLinear(ColumnParallelLinear):
        pass

    assert "--cp-ring-wire latent does not support linear_kv_up_proj of LoraLinear" in refused(
        ConfigError, linked(Layer)(LoraLinear()), torch.randn(5, 2, C)
    )
    biased = ColumnParallelLinear()
    biased.bias = Parameter(torch.ones(3))
    assert "does not support a bias of linear_kv_up_proj" in refused(
        ConfigError, linked(Layer)(biased), torch.randn(5, 2, C)
    )


DEEPSEEK = {
    "attention_dropout": 0.0,
    "multi_latent_attention": True, "num_attention_heads": 128, "kv_lora_rank": 512,
    "qk_pos_emb_head_dim": 64,
    "qk_head_dim": 128, "v_head_dim": 128, "seq_length": 32768, "micro_batch_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 8, "bf16": True, "cp_comm_type": "p2p", "num_layers": 1,
}  # fmt: skip


SPARSE = {"experimental_attention_variant": "dsa", "num_layers": 2, "dsa_indexer_head_dim": 128}


@pytest.mark.parametrize(
    "changes, settings, chosen, printed",
    [
        (
            {},
            {},
            "latent",
            "auto is latent: 1,152 bytes a token and layer travel, plain has 81,920",
        ),
        # Eight ranks of one node, where plain keys travel in the time of the computation.
        (
            {"seq_length": 1 << 20},
            {},
            "plain",
            "auto is plain: 81,920 bytes a token and layer travel, latent has 1,152",
        ),
        ({"fp8": "hybrid"}, {}, "plain", "auto is plain"),
        ({}, {"heads": 2}, "plain", "auto is plain"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            {},
            "plain",
            "auto is plain",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
            {},
            "latent",
            "auto is latent",
        ),
        (
            {},
            {"wire": "int8"},
            "int8",
            "int8: 41,984 bytes a token and layer travel, plain has 81,920; the bounds",
        ),
        (
            SPARSE,
            {},
            "plain",
            "Megatron gathers the keys of all",
        ),
        (SPARSE | {"cp_comm_type": "all_gather"}, {}, "plain", "Megatron gathers the keys of all"),
        ({"context_parallel_size": 1}, {"wire": "latent"}, "plain", ""),
        ({"multi_latent_attention": False}, {}, "plain", ""),
    ],
)
def test_what_travels_is_chosen_and_said(monkeypatch, changes, settings, chosen, printed):
    said = []
    monkeypatch.setattr("cp_ring.megatron.flags.codec_choice.note", said.append)
    monkeypatch.setattr("cp_ring.megatron.flags.codec_choice.ranks_per_node", lambda: None)
    args = SimpleNamespace(**DEEPSEEK | {"group_query_attention": False} | changes)
    assert choose_wire(args, Options.make(**settings)) == chosen
    assert [printed in line for line in said] == [True] * bool(printed)


OF_DEEPSEEK = """
    --cp-ring --cp-ring-cpu --num-layers 2 --context-parallel-size 8 --num-attention-heads 128 --seq-length 32768
    --max-position-embeddings 32768 --micro-batch-size 1 --bf16 --attention-dropout 0
"""
LATENTS = "--multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --v-head-dim 128"


def test_each_job_of_a_process_chooses_its_own_codec(applied, monkeypatch):
    """Megatron parses the flags of a job again once it runs, when the codec is chosen."""
    applied("arguments")
    monkeypatch.setenv("WORLD_SIZE", "8")
    from megatron.training import global_vars
    from megatron.training.arguments import parse_args

    def parse(more):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *shlex.split(f"{OF_DEEPSEEK} {more}")])
        return parse_args()

    first = accept_complete(parse(LATENTS))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", first)
    parse(LATENTS)
    assert first.cp_ring_wire == settings.current().wire == "latent"
    second = accept_complete(parse(""))
    assert second.cp_ring_wire == settings.current().wire == "plain"
    second.cp_ring_recurrent = "states"  # for layers of a checkpoint
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", second)
    parse("--use-checkpoint-args")
    assert settings.current().recurrent == "states"
