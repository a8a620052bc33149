"""What travels in a Megatron job: the sizes of its keys on the wire, and the line that says so at the start."""

from __future__ import annotations

import argparse
from typing import Any

from cp_ring.comm.nodes import ranks_per_node
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.megatron import comm_types, graphs
from cp_ring.megatron.plans import make_plan
from cp_ring.megatron.rejection import note
from cp_ring.plan.rates import RATES
from cp_ring.plan.simulate import simulate
from cp_ring.plan.sizes import WIRES, AttentionSizes, LatentSizes

_DTYPES = {2: "bf16", 4: "fp32"}


_OPTIONS = (
    ("fp8", "--fp8-format"),
    ("fp4", "--fp4-format"),
    ("delay_wgrad_compute", "--delay-wgrad-compute"),
    ("use_megatron_fsdp", "--use-megatron-fsdp"),
    ("use_torch_fsdp2", "--use-torch-fsdp2"),
    ("cache_mla_latents", "cache_mla_latents"),
)


def rejection(options: Any, heads: int) -> str:
    """Why latents cannot travel with these flags or this configuration, in words that name the option; "" where they can."""
    if not getattr(options, "multi_latent_attention", False):
        return "needs --multi-latent-attention"
    if heads > 1:
        return f"does not support --cp-ring-heads {heads} or --cp-comm-type a2a: latents have no heads to exchange"
    given = next((flag for name, flag in _OPTIONS if getattr(options, name, None)), "")
    if getattr(options, "recompute_granularity", None) == "selective" and "core_attn" in (
        getattr(options, "recompute_modules", None) or ["core_attn"]
    ):
        given = given or "--recompute-granularity selective of core_attn, which hides where keys come from"
    given = graphs.given(options) if not given and graphs.hold_attention(options) else given
    return f"does not support {given}" if given else ""


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


def choose_wire(args: argparse.Namespace, config: ContextParallelConfig) -> str:
    """What travels in this job: `config.wire`, or what `auto` stands for. `args` are complete.

    Prints the bytes of a token's keys and values, where they may travel in another form than their own.
    Raises `ConfigError` if latents were asked for and cannot travel.
    """
    cp, latent = args.context_parallel_size, getattr(args, "multi_latent_attention", False)
    if cp == 1 or (config.wire == "auto" and not latent):
        return "plain"
    dropout, asked = args.attention_dropout, WIRES.get(config.wire)  # None: auto
    if dropout and asked and not asked.plain:
        raise ConfigError(
            f"--cp-ring-wire {config.wire} does not support --attention-dropout {dropout:g}, for which positions travel with the "
            "keys: give --attention-dropout 0, or --cp-ring-wire plain"
        )
    problem = rejection(args, max(spec.ulysses for _, spec in comm_types.specs(args, config)))
    if asked and asked.latent and problem:
        raise ConfigError(f"--cp-ring-wire {config.wire} {problem}")
    chosen = config.wire
    if chosen == "auto":
        chosen = "latent" if not problem and not dropout and _latent_pays(args, config) else "plain"
    if latent or not WIRES[chosen].plain:
        _note(args, config.wire, chosen)
    return chosen


def _note(args: argparse.Namespace, asked: str, chosen: str) -> None:
    other = "latent" if WIRES[chosen].plain else "plain"
    here, there = (sizes_of(args, wire).wire_key_bytes // args.micro_batch_size for wire in (chosen, other))
    found = f" is {chosen}" if asked != chosen else ""
    widening = WIRES[chosen].widening
    widened = f"; the bounds of the certificate widen by {widening:g}" if widening else ""
    note(f"--cp-ring-wire {asked}{found}: {here:,} bytes a token and layer travel, {other} has {there:,}{widened}")


def _latent_pays(args: argparse.Namespace, config: ContextParallelConfig) -> bool:
    """Whether attention of one causal sequence takes less time with latents, in the model of `cp_ring.plan.simulate`."""
    cp = args.context_parallel_size
    node = config.node_size or max((ranks_per_node() or 1) // args.tensor_model_parallel_size, 1)
    plan = make_plan("causal", args.seq_length, cp)
    report = plan.verify()
    latent, plain = (simulate(plan, report, sizes_of(args, wire), RATES, node).both for wire in ("latent", "plain"))
    return latent < plain
