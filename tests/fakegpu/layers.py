"""Layers of Megatron's on the fake GPUs, with ring attention and without: whole blocks, forward and
backward.
"""

import gc
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.documents import DocumentParams, Documents
from cp_ring.megatron.options import Options
from cp_ring.megatron.specs import with_ring_attention
from tests.fakegpu.accesses import mark, recorded
from tests.fakegpu.plants import PLANTS
from tests.gpu.beside import CASES, connect

SMALL = {"tokens": 256, "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
         "num_query_groups": 2, "kv_channels": 64}  # fmt: skip
LARGE = {"tokens": 8192, "num_layers": 1, "hidden_size": 4096, "num_attention_heads": 32,
         "num_query_groups": 8, "kv_channels": 128}  # fmt: skip
"""`tokens` of a rank, and settings of Megatron's configuration."""

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED = {
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "gradient_accumulation_fusion": True,
}
"""As Megatron's scripts set them."""
LAYERS = {
    "Megatron": {"options": None},
    "Megatron --cp-ring": {"options": {}},
    "Megatron, recomputed": {"options": None, **FULL},
    "Megatron --cp-ring, recomputed": {"options": {}, **FULL},
}
"""What `beside` compares, with the layers of TransformerEngine."""


def blocks(cases, implementation="local", steps=3, planted=False):
    """Two layers a case, each `steps` times; "<case> <step>" is the part of the log.

    A case has settings of Megatron's configuration, `options` of cp_ring and `documents`, the ends
    of packed documents. planted: it has the name of a fault too, which is there.
    """
    _start()
    with recorded():
        for name, case in cases.items():
            mark(f"{name}, made")
            step = _step_of(implementation, **case)
            with PLANTS[name]() if planted else nullcontext():
                for number in range(steps):
                    mark(f"{name} {number}")
                    step()
    mark("end")


def graphs(cases, implementation="local", planted=False):
    """Two layers a case, of which Megatron makes graphs after a step, "<case> before" in the log,
    in "<case> capture"; it launches them in "<case> 0" and "<case> 1". planted: see `blocks`.
    """
    _start(use_cudagraphable_rng=True)
    with recorded():
        for name, case in cases.items():
            mark(f"{name}, made")
            step = _step_of(implementation, cuda_graph_impl="local", cuda_graph_modules=[], **case)
            torch.cuda.synchronize()  # a model's weights are made on another stream than it runs
            for weight in step.args[0].parameters():
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            mark(f"{name} before")
            step()
            mark(f"{name} capture")
            with PLANTS[name]() if planted else nullcontext():
                create_cudagraphs()
            for number in range(2):
                mark(f"{name} {number}")
                step()
            delete_cuda_graphs()
            torch.cuda.synchronize()  # Megatron makes the next layers on another stream
    mark("end")


def memory(folder, cases):
    """Writes <rank>.json: for each case the bytes that layers keep for backward, and the most that
    are allocated in a step. Gradients of weights go to buffers, as in Megatron's training.
    """
    _start()
    found = {}
    for name, case in cases.items():
        step, kept = _step_of("transformer_engine", **LARGE | FUSED | case), []
        for weight in step.args[0].parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for _ in range(3):
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step(lambda kept=kept: kept.append(torch.cuda.memory_allocated()))
        found[name] = kept[-1] - before, torch.cuda.max_memory_allocated() - before
        del step, weight
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))


def beside(case, counts):
    """What makes the step of each of `LAYERS`; as `tests.fakegpu.beside.attention`."""
    _start()
    # Else a rank of stock attention would wait for one that does not count, and has none.
    connect(parallel_state.get_context_parallel_group())
    documents = CASES[case].ends(dist.get_world_size()) if CASES[case].packed else None
    for name, layer in LAYERS.items():
        if counts:
            yield (
                name,
                partial(_step_of, "transformer_engine", documents=documents, **LARGE | layer),
            )
        elif layer["options"] is not None:
            light = LARGE | layer | {"options": {"kernel": "flash_aten"}}
            yield name, partial(_step_of, "local", documents=documents, **light)


def _start(**generators):
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(5, **generators)


def _step_of(implementation, options, documents=None, **more):
    """Without `options`, the layers have Megatron's own attention."""
    more = SMALL | more
    tokens, latent = more.pop("tokens"), "kv_lora_rank" in more
    if latent:
        del more["num_query_groups"]
    config = (MLATransformerConfig if latent else TransformerConfig)(
        normalization="RMSNorm", activation_func=F.silu, add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        masked_softmax_fusion=False, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, context_parallel_size=dist.get_world_size(),
        **{"gated_linear_unit": True, "gradient_accumulation_fusion": False} | more,
    )  # fmt: skip
    kinds = (
        gpt_layer_specs.get_gpt_layer_local_spec,
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
    )
    spec = kinds[implementation != "local"](multi_latent_attention=latent)
    if options is not None:
        settings.configure(Options.make(enabled=True, **options), whole_rows=False)
        spec = with_ring_attention(spec)
    if config.mtp_num_layers:
        further = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, implementation != "local")
        model = GPTModel(config, spec, 512, tokens, mtp_block_spec=further, parallel_output=False)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        return partial(_step, model.cuda().bfloat16(), ids, {"position_ids": ids, "labels": ids})
    block = TransformerBlock(config, spec, post_layer_norm=False).cuda()
    size = config.hidden_size
    x = torch.empty(tokens, 1, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = None if documents is None else _packed(documents, ring=options is not None)
    return partial(_step, block, x, {} if packed is None else {"packed_seq_params": packed})


def _packed(documents, ring):
    if ring:
        rows = Documents.in_rows(np.array(documents), 1, dist.get_world_size())
        return DocumentParams.carry(rows)
    ends = torch.tensor(documents, dtype=torch.int32, device="cuda")
    longest = int(np.diff(documents).max())
    return PackedSeqParams("thd", ends, ends, ends, ends, longest, longest)


def _step(block, x, more, between=int):
    out = block(x, attention_mask=None, **more)
    between()
    with torch.autograd.set_multithreading_enabled(False):
        out.backward(torch.empty_like(out))
    for leaf in (x, *block.parameters()):
        leaf.grad = None
