"""A layer specification for `--spec tests.certificate.specs NAME`, an object as Megatron before
0.19 wants it.
"""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tests.certificate.stand_in import StandInRing, faulty
from tests.parity.specs import Norm


def _experts():
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    norms = replace(spec.submodules, input_layernorm=Norm, pre_mlp_layernorm=Norm)
    return TransformerBlockSubmodules([replace(spec, submodules=norms)], layer_norm=Norm)


experts = _experts()


def with_core(core):
    """Megatron's local layer with this core attention."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    attention = spec.submodules.self_attention
    inner = replace(attention.submodules, core_attention=core)
    attention = replace(attention, submodules=inner)
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention))


any_ring = with_core(StandInRing)
wrong_ring = with_core(faulty(believed=0))
