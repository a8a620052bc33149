"""Layer specifications for `--spec tests.parity.specs NAME` that need TransformerEngine's or Apex's
norms elsewhere.
"""

from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

try:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.post_training.modelopt.hybrid import model_specs
except ImportError:  # before 0.18 they are called Mamba's
    from megatron.core.post_training.modelopt.mamba import model_specs
    from megatron.core.ssm import mamba_block as hybrid_block


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm of a part of the sequence: Megatron sums its weight's gradient over the
    tensor-parallel ranks.
    """

    def __init__(self, config, hidden_size, eps=1e-5, **ignored):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self.centered = int(config.layernorm_zero_centered_gamma)
        torch.nn.init.constant_(self.weight, 1 - self.centered)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight + self.centered, self.eps)


def sequence_parallel(config):
    """Megatron's local layers with a norm that supports --sequence-parallel."""
    latent = config.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=latent,
        multi_latent_attention=latent,
    )  # fmt: skip
    attention = spec.submodules.self_attention
    if latent:
        norms = replace(attention.submodules, q_layernorm=Norm, kv_layernorm=Norm)
        attention = replace(attention, submodules=norms)
    # of the layers that predict further tokens
    LocalSpecProvider.layer_norm = lambda *_, **__: Norm
    changes = {"input_layernorm": Norm, "pre_mlp_layernorm": Norm, "self_attention": attention}
    layer = replace(spec, submodules=replace(spec.submodules, **changes))
    return TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=Norm)


hybrid_block.TENorm = WrappedTorchNorm  # a HybridStack's last norm, whatever its specification says
with patch.object(model_specs, "Norm", WrappedTorchNorm):
    hybrid = model_specs.get_mamba_stack_modelopt_spec(local_core_attention=True)
