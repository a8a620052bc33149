"""Finds how many of the job's first layers a tiny model copies, and makes the flags that ask for
them.

A hybrid model has layers by the letters of its pattern.
"""

from __future__ import annotations

import argparse
from itertools import zip_longest
from math import lcm
from typing import Any

from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.flags.layer_pattern import (
    PATTERNS,
    SPARSE,
    expert_layers,
    letters_of,
    main_layers,
    pattern_of,
)

BY_LAYER = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "cp_comm_type")
STATE = 16  # channels of a head of a recurrent layer, and of its state


def number_of_layers(args: argparse.Namespace, config: Any, kinds: list[LayerKind]) -> int:
    """Return how many of the job's first layers show each of `kinds`, and each letter with and
    without experts; and at least as many as one prediction of further tokens has, because its
    layers count from 1 again.

    A program builds a hybrid model of its own pattern, so its tiny model has all layers.
    """
    if hasattr(args, "transformer_config") and getattr(config, "is_hybrid_model", False):
        return int(args.num_layers)
    main, *further = letters_of(args).split("/")
    experts = expert_layers(args) if getattr(args, "num_experts", None) else ()
    alike = [*zip_longest(main_layers(main), () if pattern_of(args) else experts)]
    first = [1 + alike.index(each) for each in alike]
    first += [number for kind in kinds for number in kind.numbers[:1]]
    depth = max(getattr(args, "mtp_num_layers", None) or 0, *map(len, further), 1)
    return min(args.num_layers, max(depth, *first))


def uncovered_layers(args: argparse.Namespace, config: Any) -> list[str]:
    """Return texts about layers of the job that no tiny model can have."""
    by_rank = "which Megatron defines by the tokens of a rank"
    relu = SPARSE in letters_of(args) and getattr(args, "dsa_indexer_scoring_relu", True)
    offloads = ("cpu_offloading", "fine_grained_activation_offloading")
    texts = {
        "relu of sparse attention's scores": relu,
        "the kinds of heterogeneous blocks": hasattr(config, "per_block_parameters"),
        f"the capacity of experts ({by_rank})": getattr(args, "moe_expert_capacity_factor", None),
        f"Sinkhorn routing ({by_rank})": "sinkhorn"
        in (getattr(args, "moe_router_load_balancing_type", None) or ""),
        "experts of other ranks": getattr(config, "expert_model_parallel_size", 1) > 1,
        "activations in host memory": any(getattr(config, name, False) for name in offloads),
    }
    return [text for text, uncovered in texts.items() if uncovered]


def changes_of_layers(
    args: argparse.Namespace, config: Any, kinds: list[LayerKind], tp: int
) -> dict[str, Any]:
    """Return the configuration fields that give a tiny model the first layers of the job."""
    count = number_of_layers(args, config, kinds)
    changes: dict[str, Any] = {"num_layers": count}
    for name in BY_LAYER:
        value = getattr(config, name, None)
        changes[name] = value[:count] if isinstance(value, list) else value
    if SPARSE in letters_of(args):
        # fewer keys than a tiny batch row has; with relu scores are equal, and Megatron selects any
        changes |= {"dsa_indexer_topk": STATE, "dsa_indexer_scoring_relu": False}
    if args.window_size is not None:
        changes["window_size"] = max(kind.probed for kind in kinds)
    return changes | _recurrent(args, config, tp)


def tiny_pattern(args: argparse.Namespace, layers: int) -> dict[str, str]:
    """Return the pattern of the first `layers` layers, and of those that predict tokens, under the
    argument names that the job uses; {} without a pattern.
    """
    main, *further = pattern_of(args).split("/")
    tiny = "/".join([main_layers(main)[:layers], *further])
    return {name: tiny for name in PATTERNS if getattr(args, name, None)}


def _recurrent(args: argparse.Namespace, config: Any, tp: int) -> dict[str, Any]:
    """Return small state sizes, and numbers of heads that the ranks can share as they share the
    job's.
    """
    if not (letters_of(args) or getattr(config, "is_hybrid_model", False)):
        return {}
    groups = getattr(args, "mamba_num_groups", None) or 1
    return {
        "mamba_head_dim": STATE,
        "mamba_state_dim": STATE,
        "mamba_num_heads": lcm(groups, tp * args.context_parallel_size),
        "linear_key_head_dim": STATE,
        "linear_value_head_dim": STATE,
    }
