"""Megatron's `--cp-comm-type`, by layer, as ring attention runs it: heads that are exchanged, and
the schedule of the ring.

| type | here |
|---|---|
| `p2p` | the ring, with `--cp-ring-heads` and `--cp-ring-schedule` |
| `all_gather` | the ring with the schedule `gather`: all keys that a rank needs arrive at one hop |
| `a2a` | heads exchanged among all context-parallel ranks; no ring |
| `a2a+p2p` | heads exchanged among the first hierarchical size, a ring of the second |

Nothing heavy is imported here: the flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.flags import rules
from cp_ring.megatron.flags.rule import Job, check_rules
from cp_ring.megatron.options import Options
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import parse


def spec_of_layer(
    kind: str | None,
    settings: Options,
    cp: int,
    sizes: Sequence[int] | None = None,
) -> PlanSpec:
    """How attention of a layer with `cp_comm_type` `kind` is split over `cp` ranks.

    `sizes` are the hierarchical context-parallel sizes. Raises `ConfigError` with
    a line that names the flag.
    """
    if settings.heads == "auto" and cp > 1:
        raise ConfigError("--cp-ring-heads auto does not support Megatron jobs: give a number")
    named = {
        "cp_comm_type": kind,
        "context_parallel_size": cp,
        "hierarchical_context_parallel_sizes": sizes,
    }
    job = Job(argparse.Namespace(**named), settings)
    check_rules(job, rules.SPLIT)
    (kind,), spec = job.comm_types, PlanSpec(settings.layout, settings.route)
    if cp == 1:
        return spec
    if kind == "all_gather":
        return replace(spec, schedule="gather")
    heads = (
        {"p2p": int(settings.heads), "a2a": cp}[kind]
        if kind != "a2a+p2p"
        else int((sizes or ())[0])
    )
    return replace(
        spec,
        schedule=settings.schedule if heads < cp else "auto",
        ulysses=heads,
        slot_shards=settings.slot_shards,
    )


def types_by_layer(args: argparse.Namespace) -> list[str]:
    """The type of each layer, from parsed flags; of one layer, if all have the same."""
    return Job(args).comm_types


def type_of(args: argparse.Namespace, layer: int) -> str:
    """The type of layer `layer`, from 1."""
    kinds = types_by_layer(args)
    return kinds[0] if len(kinds) == 1 else kinds[layer - 1]


def specs(args: argparse.Namespace, config: Options) -> list[tuple[str, PlanSpec]]:
    """The distinct types of the layers, and how attention of each is split."""
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    kinds = dict.fromkeys(types_by_layer(args))
    return [
        (kind, spec_of_layer(kind, config, args.context_parallel_size, sizes)) for kind in kinds
    ]


def check(job: Job) -> None:
    """Checks the flags about the shape of context parallelism against each other and the sizes of
    the model.
    """
    check_rules(job, rules.SPLITS)
    for kind, spec in specs(job.args, job.own):
        check_members(kind, spec, job.own, job.cp, job.args, job.tp)


def check_members(
    kind: str | None,
    spec: PlanSpec,
    settings: Options,
    cp: int,
    model: Any,
    tp: int,
) -> None:
    """Raises `ConfigError` unless ranks can exchange the heads of a tensor-parallel rank, and each
    member has a hop.

    `model` are Megatron's arguments, or a configuration of a layer.
    """
    heads = getattr(model, "num_attention_heads", None)
    key_heads = getattr(model, "num_query_groups", None)
    latent = getattr(model, "multi_latent_attention", False)
    if latent or not key_heads or not getattr(model, "group_query_attention", True):
        key_heads = heads
    hops = parse(settings.schedule)
    ring = kind in (None, "p2p")
    known = {
        "heads_of_rank": heads and heads // tp,
        "key_heads_of_rank": key_heads and max(key_heads // tp, 1),
        "exchange": f"--cp-ring-heads {spec.ulysses}"
        if ring
        else f"--cp-comm-type {kind} among {spec.ulysses} ranks",
        "members": cp // spec.ulysses,
        "hops": None if isinstance(hops, str) or spec.schedule != settings.schedule else len(hops),
    }
    check_rules(Job(argparse.Namespace(**known), settings, ulysses=spec.ulysses), rules.MEMBERS)
