"""What travels in a Megatron job: the sizes of its keys on the wire, and the line that says so at the start."""

from __future__ import annotations

import argparse

from cp_ring.config import ContextParallelConfig
from cp_ring.megatron.rejection import note
from cp_ring.plan.cost import AttentionSizes
from cp_ring.plan.wires import WIRES, LatentSizes

_DTYPES = {2: "bf16", 4: "fp32"}


def sizes_of(args: argparse.Namespace, wire: str) -> AttentionSizes:
    """The sizes of one layer's attention on a tensor-parallel rank. `args` are complete."""
    tp, dtype = args.tensor_model_parallel_size, _DTYPES[args.params_dtype.itemsize]
    heads, batch = args.num_attention_heads // tp, args.micro_batch_size
    if getattr(args, "multi_latent_attention", False):
        latent = LatentSizes(args.kv_lora_rank, args.qk_pos_emb_head_dim, args.qk_head_dim, args.v_head_dim)
        dim = latent.nope + latent.rope
        return AttentionSizes(heads, heads, dim, latent.value, dtype, batch=batch, wire=wire, latent=latent)
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return AttentionSizes(heads, max(groups // tp, 1), args.kv_channels, dtype=dtype, batch=batch, wire=wire)


def note_wire(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Prints the bytes of a token's keys and values on the wire, where they do not travel as they are. `args` are complete."""
    if args.context_parallel_size == 1 or config.wire == "plain":
        return
    coded, plain = (sizes_of(args, wire).wire_key_bytes // args.micro_batch_size for wire in (config.wire, "plain"))
    widening = WIRES[config.wire].widening
    widened = f"; the bounds of the certificate widen by {widening:g}" if widening else ""
    note(f"--cp-ring-wire {config.wire}: {coded:,} bytes a token and layer travel, plain has {plain:,}{widened}")
