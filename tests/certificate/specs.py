"""A layer specification for `--spec tests.certificate.specs NAME`, an object as Megatron before
0.19 wants it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm of a part of the sequence: Megatron sums its weight's gradient over the
    tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def _experts() -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    norms = dataclasses.replace(spec.submodules, input_layernorm=Norm, pre_mlp_layernorm=Norm)
    return TransformerBlockSubmodules(
        [dataclasses.replace(spec, submodules=norms)], layer_norm=Norm
    )


experts = _experts()
