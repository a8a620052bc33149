"""One of two ranks with a layer that is no part of context parallelism:
`rank(number, 2, port, folder, how)`.

Each rank gives attention layers, whose configuration has context_parallel_size 1, images of its
own: as batch rows, and packed. FOLDER/RANK.json gets the largest errors of output and gradients
against dense attention in float64, and what cp_ring printed.
"""

import contextlib
import io
import json
import os
import shlex

import torch

N, BATCH, HEADS, GROUPS, D = 24, 2, 4, 2, 16
EDGES = (0, 5, 17, 48)


def rank(number, ranks, port, folder, how):
    place = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    import megatron.training.training  # its log goes to the stdout of its import  # noqa: F401

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        errors = examine(number, ranks, port, how)
    (folder / f"{number}.json").write_text(json.dumps({"errors": errors, "said": said.getvalue()}))


def examine(number, ranks, port, how):
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    start(how)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    errors = {}
    for mask in ("no_mask", "causal"):
        layer = make_layer(mask).core_attention
        assert parallel_state.get_context_parallel_world_size() == ranks
        for packed in (False, True):
            torch.manual_seed(10 * number + packed)  # images of its own
            shape = (EDGES[-1],) if packed else (N, BATCH)
            leaves = [
                torch.randn(*shape, heads, D, requires_grad=True)
                for heads in (HEADS, GROUPS, GROUPS)
            ]
            gradient = torch.randn(*shape, HEADS * D)
            errors[f"{mask} packed={packed}"] = error(layer, leaves, gradient, mask, packed)
    dist.barrier()
    return errors


def start(how):
    if how == "enable":
        from cp_ring.megatron import enable

        enable(cpu=True)
    else:
        from cp_ring.patches.install import install

        install(
            shlex.split(
                "--cp-ring --cp-ring-cpu --cp-ring-layout balanced --cp-ring-schedule gather"
            )
        )


def make_layer(mask):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * D, num_attention_heads=HEADS, num_query_groups=GROUPS, use_cpu_initialization=True,
        attention_dropout=0.0,
    )  # fmt: skip
    assert config.context_parallel_size == 1
    spec = get_gpt_layer_local_spec().submodules.self_attention
    spec.params = {"attn_mask_type": AttnMaskType[mask]}
    return build_module(spec, config=config, layer_number=1)


def error(layer, leaves, gradient, mask, packed):
    out = layer(*leaves, None, packed_seq_params=packed_params() if packed else None)
    ours = [out, *torch.autograd.grad(out, leaves, gradient)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    dense = attend(*exact, mask, packed)
    theirs = [dense, *torch.autograd.grad(dense, exact, gradient.double())]
    return max(float((x - y).norm() / y.norm()) for x, y in zip(ours, theirs, strict=True))


def packed_params():
    from megatron.core.packed_seq_params import PackedSeqParams

    edges, longest = torch.tensor(EDGES, dtype=torch.int32), 31
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def attend(q, k, v, mask, packed):
    q, k, v = (x[:, None] if packed else x for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    n = len(q)
    place = torch.arange(n)
    image = (
        torch.bucketize(place, torch.tensor(EDGES[1:]), right=True)
        if packed
        else torch.zeros(n, dtype=torch.long)
    )
    allowed = (image[:, None] == image) & ((place[:, None] >= place) | (mask == "no_mask"))
    scores = torch.einsum("sbhd,nbhd->bhsn", q, k) / D**0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    out = torch.einsum("bhsn,nbhd->sbhd", weights, v).flatten(2)
    return out[:, 0] if packed else out
