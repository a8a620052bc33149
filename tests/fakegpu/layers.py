"""Layers of Megatron's with ring attention on the fake GPUs: whole blocks, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from cp_ring.megatron import settings
from cp_ring.megatron.data.documents import DocumentParams, Documents
from cp_ring.megatron.options import Options
from cp_ring.megatron.specs import with_ring_attention
from tests.fakegpu.accesses import mark, recorded
from tests.fakegpu.plants import PLANTS

TOKENS = 256  # of a rank


def blocks(
    cases: dict[str, dict[str, Any]],
    implementation: str = "local",
    steps: int = 3,
    planted: bool = False,
) -> None:
    """Two layers a case, each `steps` times; "<case> <step>" is the part of the log.

    A case has settings of Megatron's configuration, `options` of cp_ring and `documents`, the ends
    of packed documents. planted: it has the name of a fault too, which is there.
    """
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(5)
    with recorded():
        for name, case in cases.items():
            mark(f"{name}, made")
            step = _step_of(implementation, **case)
            with PLANTS[name]() if planted else nullcontext():
                for number in range(steps):
                    mark(f"{name} {number}")
                    step()
    mark("end")


def _step_of(
    implementation: str,
    options: dict[str, Any],
    documents: list[int] | None = None,
    **more: Any,
) -> Any:
    settings.configure(Options.make(enabled=True, **options), whole_rows=False)
    latent = "kv_lora_rank" in more
    heads = {} if latent else {"num_query_groups": 2}
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=2, hidden_size=256, num_attention_heads=4, kv_channels=64,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        masked_softmax_fusion=False, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, context_parallel_size=dist.get_world_size(),
        gradient_accumulation_fusion=False, **heads, **more,
    )  # fmt: skip
    kinds = (
        gpt_layer_specs.get_gpt_layer_local_spec,
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
    )
    spec = kinds[implementation != "local"](multi_latent_attention=latent)
    block = TransformerBlock(config, with_ring_attention(spec), post_layer_norm=False).cuda()
    x = torch.empty(TOKENS, 1, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kept: dict[str, Any] = {}
    if documents is not None:
        made = Documents.in_rows(np.array(documents), 1, "zigzag", dist.get_world_size())
        kept["packed_seq_params"] = DocumentParams.carry(made)
    return partial(_step, block, x, kept)


def _step(block: Any, x: torch.Tensor, more: dict[str, Any]) -> None:
    out = block(x, attention_mask=None, **more)
    with torch.autograd.set_multithreading_enabled(False):
        out.backward(torch.empty_like(out))
    for leaf in (x, *block.parameters()):
        leaf.grad = None
