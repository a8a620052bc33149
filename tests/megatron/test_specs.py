"""Every kind of model that Megatron builds gets ring attention in each of its attention layers, and
nothing else does.
"""

import copy
import functools
import json

import pytest
import torch

from cp_ring.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Imports Megatron when the first test runs: at collection it would cost every worker seconds."""
    global \
        GPTModel, \
        get_gpt_layer_local_spec, \
        get_gpt_mtp_block_spec, \
        DotProductAttention, \
        ModuleSpec, \
        build_module
    global \
        WrappedTorchNorm, \
        MLATransformerConfig, \
        TransformerConfig, \
        RingDotProductAttention, \
        with_ring_attention
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from cp_ring.megatron.adapter.attention import RingDotProductAttention
    from cp_ring.megatron.specs import with_ring_attention


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs the CPU runtime, which is inert where CUDA is present"
)

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


@pytest.fixture(autouse=True)
def ring(one_rank, applied):
    applied("core_attention")


def config(layers=2, kind=None, **values):
    return (kind or TransformerConfig)(num_layers=layers, **(SIZES | values))


def latent():
    sizes = {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
    }
    return config(kind=MLATransformerConfig, multi_latent_attention=True, rope_type="rope", **sizes)


def gpt(settings, spec, **more):
    return GPTModel(settings, spec, vocab_size=32, max_sequence_length=16, **more)


def plain():
    return gpt(config(), get_gpt_layer_local_spec(normalization="RMSNorm"))


def mla():
    return gpt(
        latent(), get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    )


def experts():
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    return gpt(config(num_moe_experts=4), spec)


def predictions():
    settings, spec = config(mtp_num_layers=2), get_gpt_layer_local_spec(normalization="RMSNorm")
    return gpt(
        settings,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False),
    )


def heterogeneous():
    """Four layers, of which the second has no attention and the third a linear layer in its place."""
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    attention = {"no_op": False, "replace_with_linear": False, "num_query_groups": 2}
    none = attention | {"num_query_groups": None}
    others = (none | {"no_op": True}, none | {"replace_with_linear": True})
    blocks = [attention, *others, attention]
    mlp = {"no_op": False, "replace_with_linear": False, "ffn_hidden_size": 64}
    encoded = json.dumps({"block_configs": [{"attention": block, "mlp": mlp} for block in blocks]})
    settings = config(
        4, HeterogeneousTransformerConfig, heterogeneous_layers_config_encoded_json=encoded
    )
    return gpt(settings, get_gpt_heterogeneous_layer_spec(settings, use_te=False))


def hybrid(pattern="*-*E*", **changes):
    """HybridModel, whose last norm must be TransformerEngine's: there torch's stands for it."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from tests.parity import specs

    settings = config(len(pattern), num_moe_experts=4, moe_grouped_gemm=False, **changes)
    return HybridModel(settings, specs.hybrid, 32, 16, hybrid_layer_pattern=pattern)


def count(model):
    kinds = [type(module) for module in model.modules()]
    assert DotProductAttention not in kinds
    return kinds.count(RingDotProductAttention)


@pytest.mark.parametrize(
    ("build", "layers"),
    [(plain, 2), (mla, 2), (experts, 2), (predictions, 4), (heterogeneous, 2), (hybrid, 3)],
)
def test_every_attention_layer_is_replaced(build, layers):
    assert count(build()) == layers


class OtherAttention(torch.nn.Module):
    """A core attention that cp_ring does not know."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: OtherAttention,
        lambda: ModuleSpec(module=OtherAttention),
        lambda: functools.partial(OtherAttention, config=None),
    ],
)
def test_another_core_attention_is_rejected_by_name(make):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = make()
    with pytest.raises(
        ConfigError,
        match=r"--cp-ring replaces DotProductAttention and TEDotProductAttention, not "
        r"OtherAttention",
    ):
        gpt(config(), spec)


def derived(kept=None, **more):
    """A class that differs from Megatron's by its constructor, as Gemma's do, and by `more`."""

    class ByLayer(DotProductAttention):
        def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
            config = copy.copy(config)
            config.window_size = (config.window_size - 1, 0) if layer_number % 2 else None
            super().__init__(config, layer_number, attn_mask_type, attention_type, **kwargs)
            if kept:
                self.kept = kept(self)

    for name, value in more.items():
        setattr(ByLayer, name, value)
    return ByLayer


def of_layers(core_attention):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = core_attention
    layers = gpt(config(window_size=6), spec).decoder.layers
    return [layer.self_attention.core_attention for layer in layers]


def test_a_class_that_differs_by_its_constructor_is_asked():
    layers = of_layers(derived())
    assert [layer.window for layer in layers] == [(5, 0), (-1, -1)]
    assert all(isinstance(layer, RingDotProductAttention) for layer in layers)


@pytest.mark.parametrize(
    "more",
    [
        {"forward": lambda self, *args: None},
        {"scale": 2.0},
        {"kept": lambda self: 3},
        {"kept": lambda self: self.hidden_size_per_partition},
    ],
)
def test_a_class_that_differs_by_more_is_rejected_by_name(more):
    with pytest.raises(ConfigError, match="not ByLayer"):
        of_layers(derived(**more))


def test_a_cache_of_keys_has_stock_attention():
    from megatron.core.inference.contexts import StaticInferenceContext

    model = gpt(
        config(window_size=(2, 0), softmax_type="learnable"),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
    ).eval()
    for layer in model.decoder.layers:
        torch.nn.init.normal_(layer.self_attention.core_attention.softmax_offset)
    tokens, places = torch.arange(8)[None], torch.arange(8)[None]
    context = StaticInferenceContext(1, 8)
    with torch.no_grad():
        whole = model(tokens, places, None)
        for part in (slice(0, 6), slice(6, 7), slice(7, 8)):
            found = model(tokens[:, part], places[:, part], None, inference_context=context)
            context.increment_sequence_len_offset(part.stop - part.start)
            torch.testing.assert_close(found[:, -1], whole[:, part.stop - 1])


def test_a_cache_of_keys_is_rejected_where_the_ranks_share_the_tokens():
    from megatron.core.inference.contexts import StaticInferenceContext

    model = gpt(config(), get_gpt_layer_local_spec(normalization="RMSNorm")).eval()
    model.config.context_parallel_size = 2
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ConfigError, match="needs --context-parallel-size 1"):
        model(tokens, tokens, None, inference_context=StaticInferenceContext(1, 8))
