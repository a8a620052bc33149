"""Chooses the wire codec of a Megatron job, and prints the size of its keys on the wire at the
start.
"""

from __future__ import annotations

import argparse
from typing import Any

from cp_ring.comm.nodes import ranks_per_node
from cp_ring.errors import ConfigError
from cp_ring.megatron.attention_sizes import attention_sizes
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.flags.checks_attention import recomputes_attention
from cp_ring.megatron.flags.layer_pattern import SPARSE, letters_of
from cp_ring.megatron.options import Options
from cp_ring.megatron.plans import make_plan
from cp_ring.megatron.rejection import note
from cp_ring.plan.sizes.attention_sizes import WIRES, AttentionSizes
from cp_ring.plan.time import Conditions


def latent_problem(options: Any, ulysses: int, settings: Options) -> str | None:
    """Return one line that says why latents cannot travel with these flags or this configuration,
    or None.
    """
    args, wire = Asked(options), f"--cp-ring-wire {settings.wire}"
    plain = "or give --cp-ring-wire plain"
    if not args.multi_latent_attention:
        return f"{wire} needs --multi-latent-attention: give it, {plain}"
    if ulysses > 1:
        return (
            f"{wire} does not support --cp-ring-heads {ulysses} or --cp-comm-type a2a: give "
            "--cp-ring-wire plain"
        )
    other = args.first(
        "fp8", "fp4", "delay_wgrad_compute", "use_megatron_fsdp", "use_torch_fsdp2",
        "cache_mla_latents",
    )  # fmt: skip
    if other:
        return f"{wire} does not support {other}: leave it out, {plain}"
    if recomputes_attention(args):
        return (
            f"{wire} does not support recomputation of core_attn alone "
            "(--recompute-granularity selective): leave core_attn out of --recompute-modules, "
            f"{plain}"
        )
    return None


def check_latent(options: Any, ulysses: int, settings: Options) -> None:
    """Raise `ConfigError` if the settings ask for latents on the wire and latents cannot travel."""
    travel = settings.wire in WIRES and WIRES[settings.wire].latent
    if travel and (line := latent_problem(options, ulysses, settings)):
        raise ConfigError(line)


def choose_wire(args: argparse.Namespace, config: Options) -> str:
    """Return the wire codec of this job: `config.wire`, or the codec that `auto` chooses. `args`
    must be complete.

    Prints the bytes of a token's keys and values if the job could use more than one codec. Raises
    `ConfigError` if latents were asked for and cannot travel.
    """
    cp, latent = args.context_parallel_size, getattr(args, "multi_latent_attention", False)
    if cp == 1:
        return "plain"
    if latent and SPARSE in letters_of(args):
        note("sparse attention: Megatron gathers the keys of all tokens")
        return "plain"
    ulysses = max(spec.ulysses for _, spec in comm_types.specs(args, config))
    check_latent(args, ulysses, config)
    chosen = config.wire
    if chosen == "auto":
        chosen = "plain"
        if not latent_problem(args, ulysses, config) and _latent_pays(args, config):
            chosen = "latent"
    if latent or not WIRES[chosen].plain:
        _note(args, config.wire, chosen)
    return chosen


def _sizes(args: argparse.Namespace, wire: str) -> AttentionSizes:
    return attention_sizes(args, args.tensor_model_parallel_size, wire)


def _note(args: argparse.Namespace, asked: str, chosen: str) -> None:
    other = "latent" if WIRES[chosen].plain else "plain"
    own, others = (
        _sizes(args, wire).wire_key_bytes // args.micro_batch_size for wire in (chosen, other)
    )
    choice = f" is {chosen}" if asked != chosen else ""
    widening = WIRES[chosen].widening
    widened = f"; the bounds of the certificate widen by {widening:g}" if widening else ""
    note(
        f"--cp-ring-wire {asked}{choice}: {own:,} bytes a token and layer travel, {other} has "
        f"{others:,}{widened}"
    )


def _latent_pays(args: argparse.Namespace, config: Options) -> bool:
    """Return True if attention of one causal sequence is predicted to be faster with latents."""
    cp = args.context_parallel_size
    node = max((ranks_per_node() or 1) // args.tensor_model_parallel_size, 1)
    plan = make_plan("causal", args.seq_length, cp)
    latent, plain = (
        plan.time(Conditions(_sizes(args, wire), node=node)).both for wire in ("latent", "plain")
    )
    return latent < plain
