"""One of two ranks that train GPT models of megatron.core for one step without megatron.training:
`core_worker.py OUT.json`.

Each case is run with a context parallel size of 1, with stock attention where Megatron has such a
model on the CPU, and of 2, with ring attention, as it is and with a fault planted. OUT.json holds
the loss and the gradient norms of all parameters.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from cp_ring import Layout, patches
from cp_ring.patches import cpu_runtime
from tests.megatron.groups import end_groups
from tests.parity.deliveries import cut
from tests.parity.faults import planted

N, VOCAB = 64, 128
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 24,
    "rope_type":
    "rope",
    "qk_layernorm": True,
}  # fmt: skip
WINDOW = {"window_size": (11, 0)}


@dataclass(frozen=True)
class Case:
    """A model: settings of its configuration, the mask type of its layers, how its tokens come, the
    fault that it must show, and how its keys travel."""

    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = "mask widened"
    mask: str = "causal"
    data: str = "rows"
    stock: bool = True
    wire: str = "auto"


CASES = {
    "causal": Case(),
    "no_mask": Case(
        mask="no_mask", fault="window widened", settings={"window_size": (9, 9)}, stock=False
    ),
    "window": Case(WINDOW, "window widened"),
    "window_on_alternate_layers": Case(
        {**WINDOW, "window_attn_skip_freq": 2}, "window on every layer"
    ),
    "off_by_one": Case({"softmax_type": "off-by-one"}, "sink dropped"),
    "learnable_sinks": Case({"softmax_type": "learnable", **WINDOW}, "sink gradient dropped"),
    "mla": Case(LATENT, "scale of the head size", stock=False),
    "mla_latent_wire": Case(LATENT, "weight gradient twice", stock=False, wire="latent"),
    "moe": Case({"num_moe_experts": 4, "moe_router_topk": 2}),
    "packed_thd": Case(data="thd", fault="boundary shifted by one", stock=False),
    "document_mask": Case(data="documents", fault="documents merged", stock=False),
    "document_mask_window": Case(
        WINDOW, data="documents", fault="boundary shifted by one", stock=False
    ),
}


GENERATE = {
    name
    for name, case in CASES.items()
    if (case.data, case.mask) == ("rows", "causal") and "kv_lora_rank" not in case.settings
}
"""Megatron's own attention on the CPU, which answers here, knows no latents."""


def configuration(case: Case, cp: int) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "kv_lora_rank" in case.settings else TransformerConfig
    heads = {} if kind is MLATransformerConfig else {"num_query_groups": 2}
    common = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "normalization":
        "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "masked_softmax_fusion": False,
        "use_cpu_initialization": True,
        "context_parallel_size": cp, "init_method_std": 0.1,
    }  # fmt: skip
    return kind(**common, **heads, **case.settings)


def build(case: Case, cp: int, ring: bool) -> Any:
    """The model, with the same weights whatever `cp` and `ring`."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.specs import with_ring_attention

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    config = configuration(case, cp)
    options = {
        "num_experts": config.num_moe_experts,
        "qk_layernorm": config.qk_layernorm,
        "normalization": "RMSNorm",
    }
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        multi_latent_attention="kv_lora_rank" in case.settings, **options
    )
    if case.mask == "no_mask":
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    model = GPTModel(
        config, with_ring_attention(spec) if ring else spec, VOCAB, N,
            position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.data = torch.linspace(-1, 1, parameter.numel())
    return model


def batch(case: Case, rank: int, cp: int) -> dict[str, Any]:
    """This rank's part of two rows, or one row of documents: input_ids, position_ids, labels [b, n
    / cp] and their mask.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_ring.megatron.data.documents import DocumentParams, Documents

    random = torch.Generator().manual_seed(9)
    rows = 1 if case.data == "thd" else 2
    tokens = torch.randint(0, VOCAB, (rows, N + 1), generator=random)
    whole = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(N).expand(rows, N),
    }
    counted = torch.ones(rows, N)
    if case.data == "documents":
        documents = Documents.in_rows(np.array([0, 5, 30, 64, 100, 101, 128]), rows, "zigzag", cp)
        parts = {name: documents.shard(value, rank) for name, value in whole.items()}
        return {
            **parts,
            "mask": documents.shard(counted, rank),
            "packed_seq_params": DocumentParams.carry(documents),
        }
    if case.data == "rows":
        layout = Layout.zigzag(N, cp) if cp > 1 else Layout.contiguous(N, 1)
        return {
            name: layout.shard(value, rank, 1) for name, value in {**whole, "mask": counted}.items()
        }
    real, padded = cut(N, 3)
    for start, stop, length in zip(padded[:-1], padded[1:], np.diff(real), strict=True):
        counted[:, start + length - 1 : stop] = 0
    layout = Layout.per_document_zigzag(padded, cp) if cp > 1 else Layout.contiguous(N, 1)
    ends, ends_padded, longest = (
        torch.from_numpy(real).int(),
        torch.from_numpy(padded).int(),
        int(np.diff(padded).max()),
    )
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends_padded,
        cu_seqlens_kv_padded=ends_padded, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
    parts = {
        name: layout.shard(value, rank, 1) for name, value in {**whole, "mask": counted}.items()
    }
    return {**parts, "packed_seq_params": packed}


def step(case: Case, cp: int, ring: bool, fault: str = "") -> dict[str, Any]:
    """Loss per token, and the norm of each parameter's gradient, of all tokens together."""
    from megatron.core import parallel_state

    from cp_ring.megatron import settings
    from cp_ring.megatron.data import documents
    from cp_ring.options import Options

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    try:
        kernel = "reference" if cp == 1 else "auto"
        settings.configure(
            Options.make(enabled=True, kernel=kernel, wire=case.wire),
            whole_rows=False,
        )
        inputs = batch(case, parallel_state.get_context_parallel_rank(), cp)
        mask, group = inputs.pop("mask"), parallel_state.get_context_parallel_group()
        hidden = causal_mask(case) if not ring else None
        documents._of_offsets.cache_clear()  # the plans that equal documents had without the fault
        with planted(fault):
            model = build(case, cp, ring)
            losses = model(attention_mask=hidden, **inputs)
            total = (losses * mask).sum()
            total.backward()
        count, total = mask.sum(), total.detach()
        # A fault may leave a parameter without a gradient.
        gradients = {
            name: p.grad if p.grad is not None else torch.zeros_like(p)
            for name, p in model.named_parameters()
        }
        for tensor in (count, total, *gradients.values()):
            dist.all_reduce(tensor, group=group)
        norms = {name: float((gradient / count).norm()) for name, gradient in gradients.items()}
        return {"loss": float(total / count), "gradients": norms}
    finally:
        end_groups()


@torch.no_grad()
def generated(case: Case, ring: bool) -> list[Any]:
    """Logits of two rows, of which the likeliest token is the next one, 9 times. With `ring` the
    keys of earlier tokens are cached.
    """
    from megatron.core import parallel_state
    from megatron.core.inference.contexts import StaticInferenceContext

    parallel_state.initialize_model_parallel()
    model = build(case, 1, ring or not case.stock).eval()
    tokens, places = torch.arange(22).view(2, 11), torch.arange(N).expand(2, N)
    context, logits = StaticInferenceContext(2, N) if ring else None, []
    for start, stop in pairwise((0, *range(11, 20))):
        part = slice(start if ring else 0, stop)
        inputs = tokens[:, part], places[:, part], None
        last = model(*inputs, inference_context=context, runtime_gather_output=True)[:, -1]
        if ring:
            context.sequence_len_offset = stop
        logits.append(last.tolist())
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    end_groups()
    return logits


def causal_mask(case: Case) -> torch.Tensor:
    """What stock attention is given: True hides a key. It adds its own window."""
    return torch.ones(1, 1, N, N, dtype=torch.bool).triu(1)


def main() -> None:
    from megatron.core.tensor_parallel import random

    cpu_runtime.apply_in_worker()
    random._set_cuda_rng_state = cpu_runtime._set_rng_state
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    patches.get("document_mask").apply()
    results = {}
    for name, case in CASES.items():
        results[name] = {
            "one": step(case, 1, ring=not case.stock),
            "two": step(case, 2, ring=True),
            "fault": step(case, 2, ring=True, fault=case.fault),
        }
        if name in GENERATE:
            results[name]["generated"] = [generated(case, ring) for ring in (False, True)]
    if dist.get_rank() == 0:
        import megatron.core

        Path(sys.argv[1]).write_text(
            json.dumps({"version": megatron.core.__version__, "cases": results})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
