"""Chooses the wire codec of a Megatron job, and prints the size of its keys on the wire at the
start.
"""

from __future__ import annotations

import argparse

from cp_ring.comm.nodes import ranks_per_node
from cp_ring.megatron.adapter.attention_sizes import attention_sizes
from cp_ring.megatron.adapter.latent_tap import latent_problem
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.layer_pattern import SPARSE, letters_of
from cp_ring.megatron.options import Options
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import plan
from cp_ring.plan.sizes.attention_sizes import WIRES, AttentionSizes
from cp_ring.plan.time import Conditions


def choose_wire(args: argparse.Namespace, config: Options) -> str:
    """Return the wire codec of this job: `config.wire`, or the codec that `auto` chooses. `args`
    must be complete.

    Prints the bytes of a token's keys and values if the job could use more than one codec. Raises
    `ConfigError` if latents were asked for and cannot travel.
    """
    latent = args.multi_latent_attention
    if args.context_parallel_size == 1:
        return "plain"
    if latent and SPARSE in letters_of(args):
        note("sparse attention: Megatron gathers the keys of all tokens")
        return "plain"
    chosen = config.wire
    if chosen == "auto":
        near = max((ranks_per_node() or 1) // args.tensor_model_parallel_size, 1)
        chosen = fastest_wire(args, config, near)
    if latent or not WIRES[chosen].plain:
        _note(args, config.wire, chosen)
    return chosen


def _sizes(args: argparse.Namespace, wire: str) -> AttentionSizes:
    return attention_sizes(args, args.tensor_model_parallel_size, wire)


def _note(args: argparse.Namespace, asked: str, chosen: str) -> None:
    other = "latent" if WIRES[chosen].plain else "plain"
    own, others = (
        _sizes(args, wire).on_wire()[0] // args.micro_batch_size for wire in (chosen, other)
    )
    choice = f" is {chosen}" if asked != chosen else ""
    widening = WIRES[chosen].widening
    widened = f"; the bounds of the certificate widen by {widening:g}" if widening else ""
    note(
        f"--cp-ring-wire {asked}{choice}: {own:,} bytes a token and layer travel, {other} has "
        f"{others:,}{widened}"
    )


def fastest_wire(args: argparse.Namespace, config: Options, near: int) -> str:
    """Return the codec that `auto` chooses where `near` context-parallel ranks share a node: latent
    if latents can travel, and attention of one causal sequence is predicted to be faster with them.
    """
    ulysses = max(spec.ulysses for _, spec in comm_types.specs(args, config))
    if latent_problem(args, ulysses, config):
        return "plain"
    causal = plan(Mask.causal(args.seq_length), args.context_parallel_size)
    latent, plain = (
        causal.time(Conditions(_sizes(args, wire), node=near)).both for wire in ("latent", "plain")
    )
    return "latent" if latent < plain else "plain"
