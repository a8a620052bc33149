"""Mamba and gated delta net layers for `--spec tests.parity.recurrent hybrid`, and GPT layers for
`--spec tests.parity.recurrent linear_attention`, with torch in place of the CUDA kernels.

The kernels are those of the packages mamba_ssm and fla. Documents arrive as these take them: the
number of each token's document, or offsets in one batch row.
"""

import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec

from cp_ring.megatron.wrapping import around
from tests.parity.specs import Norm, hybrid
from tests.recurrences import (
    causal_conv1d,
    chunk_scan,
    delta_product,
    delta_rule,
    kimi_rule,
    l2norm,
    scan,
)


class GroupNorm(torch.nn.Module):
    """RMS norm of each group of channels, behind a gate if there is one."""

    def __init__(self, size, eps, group_size, dtype, **ignored):
        super().__init__()
        self.weight, self.eps, self.group_size = (
            torch.nn.Parameter(torch.ones(size, dtype=dtype)),
            eps,
            group_size,
        )

    def forward(self, x, gate=None):
        x = x if gate is None else x * F.silu(gate)
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Of checkpoints: each tensor-parallel rank has the weight of its own channels."""
        state = self.state_dict(prefix="", keep_vars=True)
        return mamba_mixer.make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets
        )


class Duplicated(torch.nn.Linear):
    """A linear layer that each tensor-parallel rank has as a whole."""

    def __init__(self, size, out, *, config, init_method, **ignored):
        super().__init__(size, out, bias=False)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x), None


class LocalProvider(LocalSpecProvider):
    """Megatron's local parts, with norms that support --sequence-parallel."""

    def linear(self):
        return Duplicated

    def column_parallel_layer_norm_linear(self):
        return ColumnParallelLinear  # after a norm of its own

    def layer_norm(self, *args, **kwargs):
        return Norm


def _with_own_norm(spec):
    return replace(spec, metainfo={"fuse_input_layernorm": False})


def _local_attention(config, backend=None):
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return _with_own_norm(layer.submodules.self_attention)


def _local_delta_net(config, backend=None):
    return _with_own_norm(_DELTA_NET(config, backend))


def linear_attention(config):
    """The layers of --experimental-attention-variant gated_delta_net, which Megatron itself makes
    of TransformerEngine's parts alone.
    """
    LocalSpecProvider.layer_norm = LocalProvider.layer_norm  # of the layers that predict
    if config.experimental_attention_variant == "dsa":
        _stand_in_for_sparse()
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)


def _called(submodules, config, spec, *rest):
    """Some scripts give the model a function as they find it."""
    return submodules(config, spec(config) if inspect.isfunction(spec) else spec, *rest)


transformer_block._get_block_submodules = around(_called)(transformer_block._get_block_submodules)


def _stand_in_for_sparse():
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa

    absorbed_mla.TELinear = Duplicated
    dsa.fused_qk_topk_naive = _first_of_equal


def _sparse_hybrid():
    """`hybrid`, whose layers of letter D are made as in Megatron's own hybrid models."""
    _stand_in_for_sparse()
    config = SimpleNamespace(
        multi_latent_attention=True, qk_l2_norm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    attention = variants.get_dsa_module_spec_for_backend(config, LocalProvider())
    layer = hybrid.submodules.dsa_layer
    parts = replace(layer.submodules, self_attention=attention)
    layer = replace(layer, submodules=parts)
    parts = replace(hybrid.submodules, dsa_layer=layer)
    return replace(hybrid, submodules=parts)


def _of_products():
    """`hybrid`, whose layers of letter M are gated delta products."""
    module = importlib.import_module("megatron.core.ssm.gated_delta_product")
    module.HAVE_FLA, module.HAVE_MAMBA_SSM, module.l2_norm = True, True, l2norm
    module.chunk_gated_delta_product, module.ExtendedRMSNorm = delta_product, GroupNorm
    module.check_fla_sequence_packing_support = lambda: (True, "")
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    parts = module.GatedDeltaProductMixerSubmodules(**linear)
    mixer = ModuleSpec(module=module.GatedDeltaProductMixer, submodules=parts)
    layer = hybrid.submodules.mamba_layer
    layer = replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    parts = replace(hybrid.submodules, mamba_layer=layer)
    return replace(hybrid, submodules=parts)


def _first_of_equal(q, k, weights, topk, **named):
    """As Megatron's `fused_qk_topk_naive`, but of equal scores the earlier keys are selected:
    relu makes many zeros, of which `torch.topk` takes any.
    """
    scores, _ = _TOPK(q, k, weights, topk, **named)
    found = scores.sort(dim=-1, descending=True, stable=True)
    selected = found.indices.masked_fill(found.values == float("-inf"), -1)
    return scores, selected[..., : min(topk, len(k))]


if variants is not None:
    try:
        from megatron.core.transformer.experimental_attention_variant.dsa import (
            fused_qk_topk_naive as _TOPK,
        )
    except ImportError:  # before 0.19
        _TOPK = None
    else:
        if hasattr(getattr(hybrid.submodules, "dsa_layer", None), "submodules"):  # since 0.19
            sparse_hybrid = _sparse_hybrid()
    _DELTA_NET = variants.get_gated_delta_net_module_spec
    variants.get_gated_delta_net_module_spec = _local_delta_net
    variants._get_self_attention_module_spec = _local_attention
    variants._get_backend_spec_provider = lambda config: LocalProvider()
mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.mamba_split_conv1d_scan_combined = scan
mamba_mixer.mamba_chunk_scan_combined = chunk_scan
mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
mamba_mixer.ExtendedRMSNorm = GroupNorm
for _name, _module in list(sys.modules.items()):
    if _name.startswith(gated_delta_net.__name__):
        _module.HAVE_FLA, _module.l2norm = True, l2norm
        _module.causal_conv1d, _module.chunk_gated_delta_rule = causal_conv1d, delta_rule
        if hasattr(_module, "chunk_gdn2"):  # since 0.20
            _module.chunk_gdn2 = delta_rule
        if hasattr(_module, "chunk_kda"):  # in development
            _module.HAVE_FLA_KDA, _module.chunk_kda = True, kimi_rule
if importlib.util.find_spec("megatron.core.ssm.gated_delta_product"):  # since 0.20
    gated_delta_product_stack_spec = _of_products()
