"""Megatron's `--cp-comm-type`, by layer, as ring attention runs it: heads that are exchanged, and the schedule of the ring.

| type | here |
|---|---|
| `p2p` | the ring, with `--cp-ring-heads` and `--cp-ring-schedule` |
| `all_gather` | the ring with the schedule `gather`: all keys that a rank needs arrive at one hop |
| `a2a` | heads exchanged among all context-parallel ranks; no ring |
| `a2a+p2p` | heads exchanged among the first of `--hierarchical-context-parallel-sizes`, a ring of the second |

Nothing heavy is imported here: the flags are checked before torch and Megatron are loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.routes import DEFAULT, ROUTES
from cp_ring.plan.schedule import parse, text

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
SIZES = "--hierarchical-context-parallel-sizes"


def spec_of_layer(
    kind: str | None,
    settings: ContextParallelConfig,
    cp: int,
    sizes: Sequence[int] | None = None,
    group: Sequence[int] | None = None,
) -> PlanSpec:
    """How attention of a layer with `cp_comm_type` `kind` is split over `cp` ranks.

    `sizes` are the hierarchical context-parallel sizes.

    `group` are the ranks of the context-parallel group in the whole job, from which the node size follows if no flag gives it.
    Raises `ConfigError` with a line that names the flag.
    """
    kind = _known(kind)
    if "auto" in (settings.route, settings.heads):
        raise ConfigError("--cp-ring-route auto and --cp-ring-heads auto need the flags of a job: give a route and a number")
    named = PlanSpec(settings.layout, settings.route)
    if cp == 1:
        return named
    node = settings.node_size or node_size(group or (), ranks_per_node() if group else None)
    if kind == "all_gather" and settings.route in ROUTES and ROUTES[settings.route].own_schedule:
        raise ConfigError(f"--cp-comm-type all_gather and --cp-ring-route {settings.route} exclude one another: drop one")
    if kind != "p2p" and settings.heads != 1:
        both = f"--cp-comm-type {kind} and --cp-ring-heads {settings.heads}"
        raise ConfigError(f"{both} both say which ranks exchange heads: drop one")
    if kind == "all_gather":
        if settings.schedule not in ("auto", "gather"):
            raise ConfigError(f"--cp-comm-type all_gather is --cp-ring-schedule gather, not {settings.schedule}: drop one")
        return replace(named, schedule="gather", node_size=node)
    heads = {"p2p": int(settings.heads), "a2a": cp}[kind] if kind != "a2a+p2p" else _first_level(cp, sizes)
    if cp % heads:
        raise ConfigError(f"--cp-ring-heads {heads} does not divide --context-parallel-size {cp}: change either")
    schedule = settings.schedule if heads < cp else "auto"
    return replace(named, schedule=schedule, ulysses=heads, node_size=node, slot_shards=settings.slot_shards)


def types_by_layer(args: argparse.Namespace) -> list[str]:
    """The type of each layer, from parsed flags; of one layer, if all have the same."""
    given = getattr(args, "cp_comm_type", None) or ["p2p"]
    return [_known(kind) for kind in ([given] if isinstance(given, str) else given)]


def type_of(args: argparse.Namespace, layer: int) -> str:
    """The type of layer `layer`, from 1."""
    kinds = types_by_layer(args)
    return kinds[0] if len(kinds) == 1 else kinds[layer - 1]


def specs(
    args: argparse.Namespace, config: ContextParallelConfig, group: Sequence[int] | None = None
) -> list[tuple[str, PlanSpec]]:
    """The distinct types of the layers, and how attention of each is split; `group` as in `spec_of_layer`."""
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    kinds = dict.fromkeys(types_by_layer(args))
    return [(kind, spec_of_layer(kind, config, args.context_parallel_size, sizes, group)) for kind in kinds]


def check(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Checks the flags about the shape of context parallelism against each other and the sizes of the model."""
    cp, sizes = args.context_parallel_size, getattr(args, "hierarchical_context_parallel_sizes", None)
    if sizes and prod(sizes) != cp:
        shown = " ".join(map(str, sizes))
        raise ConfigError(f"{SIZES} {shown} multiply to {prod(sizes)}, not to --context-parallel-size {cp}: change either")
    config = _without_auto(config, types_by_layer(args))
    kinds, layers = types_by_layer(args), getattr(args, "num_layers", None)
    if len(kinds) > 1 and layers is not None and len(kinds) != layers and cp > 1:
        raise ConfigError(f"--cp-comm-type has {len(kinds)} entries for --num-layers {layers}: give one, or one for each layer")
    for kind, spec in specs(args, config):
        check_heads(kind, spec.ulysses, getattr(args, "num_attention_heads", None), args.tensor_model_parallel_size)
        _check_schedule(config, spec, cp)


def _without_auto(config: ContextParallelConfig, kinds: Sequence[str]) -> ContextParallelConfig:
    """The settings as they are checked before a shape is chosen: any choice of its own passes where these do."""
    if config.heads == "auto" and any(kind != "p2p" for kind in kinds):
        kind = next(kind for kind in kinds if kind != "p2p")
        raise ConfigError(f"--cp-comm-type {kind} and --cp-ring-heads auto both say which ranks exchange heads: drop one")
    simple = {"route": DEFAULT} if config.route == "auto" else {}
    return config.model_copy(update=simple | ({"heads": 1} if config.heads == "auto" else {}))


def check_heads(kind: str | None, ulysses: int, heads: int | None, tp: int) -> None:
    """Raises `ConfigError` unless the exchange divides the query heads of a tensor-parallel rank; None is an unknown number."""
    if heads is None or heads // tp % ulysses == 0:
        return
    flag = f"--cp-ring-heads {ulysses}" if _known(kind) == "p2p" else f"--cp-comm-type {kind} among {ulysses} ranks"
    raise ConfigError(f"{flag} does not divide the {heads // tp} query heads of a tensor-parallel rank: change either")


def _check_schedule(config: ContextParallelConfig, spec: PlanSpec, cp: int) -> None:
    """A list of hops is for the members of the ring."""
    if spec.schedule == config.schedule and not isinstance(parse(config.schedule), str):
        members, hops = cp // spec.ulysses, len(parse(config.schedule))
        if members != hops:
            shown = f"--cp-ring-schedule {text(config.schedule)}"
            raise ConfigError(f"{shown}: {hops} hops for a ring of {members} members, of {spec.ulysses} ranks each")


def _known(kind: Any) -> str:
    if kind is None:
        return "p2p"
    if kind == "allgather":  # as Megatron's own help has it
        return "all_gather"
    if kind not in TYPES:
        raise ConfigError(f"--cp-comm-type {kind}: known are {', '.join(TYPES)}")
    return str(kind)


def _first_level(cp: int, sizes: Sequence[int] | None) -> int:
    if not sizes:
        raise ConfigError(f"--cp-comm-type a2a+p2p needs {SIZES} U R: heads are exchanged among U ranks, in a ring of R members")
    if len(sizes) != 2 or prod(sizes) != cp:
        shown = f"{SIZES} {' '.join(map(str, sizes))}"
        raise ConfigError(f"{shown}: --cp-comm-type a2a+p2p takes 2 sizes, which multiply to --context-parallel-size {cp}")
    return int(sizes[0])
