"""Which classes of core attention are replaced, and which are rejected. That each kind of model gets
ring attention in each of its layers is held by tests/parity: stock attention has no ranks.
"""

import functools
import json

import pytest
import torch

from cp_ring.errors import ConfigError
from tests.rings import refused


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Imports Megatron when the first test runs: at collection it would cost every worker seconds."""
    global GPTModel, get_gpt_layer_local_spec, DotProductAttention, ModuleSpec
    global TransformerConfig, RingDotProductAttention
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_ring.megatron.adapter.attention import RingDotProductAttention


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


def gpt(settings, spec, **more):
    return GPTModel(settings, spec, vocab_size=32, max_sequence_length=16, **more)


def test_layers_without_attention_stay_as_they_are():
    """Of four layers the second has no attention, and the third a linear layer in its place."""
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
    model = gpt(settings, get_gpt_heterogeneous_layer_spec(settings, use_te=False))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(RingDotProductAttention) == 2 and DotProductAttention not in kinds


@pytest.mark.parametrize(
    "make",
    [
        lambda other: other,
        lambda other: ModuleSpec(module=other),
        lambda other: functools.partial(other, config=None),
    ],
)
def test_another_core_attention_is_rejected_by_name(make):
    class OtherAttention(DotProductAttention):
        """A core attention that cp_ring does not know, such as Gemma's in Megatron Bridge."""

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = make(OtherAttention)
    assert (
        "--cp-ring replaces DotProductAttention and TEDotProductAttention, not OtherAttention"
        in refused(ConfigError, gpt, config(), spec)
    )


def test_a_window_that_a_class_reads_by_layer_names_the_ring_beneath():
    with pytest.raises(ConfigError, match=r"--window-size 6 is one number, .*--cp-ring-beneath te"):
        gpt(config(window_size=6), get_gpt_layer_local_spec(normalization="RMSNorm"))


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
    assert "needs --context-parallel-size 1" in refused(
        ConfigError, model, tokens, tokens, None, inference_context=StaticInferenceContext(1, 8)
    )
