"""Chooses the layers that a tiny model copies, one of each kind in the job's order, and makes the
flags that ask for them.

A hybrid model has layers by the letters of its pattern.
"""

from __future__ import annotations

import argparse
from math import lcm
from typing import Any

from cp_ring.megatron.certificate.layer_kinds import LayerKind, declared_window
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.layer_pattern import (
    PATTERNS,
    RECURRENT,
    SPARSE,
    expert_layers,
    letters_of,
    main_layers,
    pattern_of,
)

STATE = 16  # channels of a head of a recurrent layer, and of its state


def chosen_layers(args: argparse.Namespace, config: Any, kinds: list[LayerKind]) -> list[int]:
    """Return the numbers, counted from 1, of the layers that a tiny model copies: the first one of
    each of `kinds`, and of each letter with and without experts.

    A program builds a hybrid model of its own pattern, so its tiny model has all layers.
    """
    numbers = range(1, args.num_layers + 1)
    if hasattr(args, "transformer_config") and getattr(config, "is_hybrid_model", False):
        return list(numbers)
    letters, experts = main_layers(letters_of(args)), layers_with_experts(args)
    first = {kind.numbers[0] for kind in kinds if kind.numbers}
    alike = {(letters[at - 1 : at], *experts[at - 1 : at]): at for at in reversed(numbers)}
    return sorted(first.union(alike.values() if letters or experts else ()))


def layers_with_experts(args: argparse.Namespace) -> list[int]:
    """Return 1 for each layer of the job that has experts by `--moe-layer-freq` and 0 for the
    others; [] if all layers are alike.
    """
    alike = not getattr(args, "num_experts", None) or pattern_of(args)
    return [] if alike or getattr(args, "moe_layer_freq", 1) in (1, None) else expert_layers(args)


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
    """Return the configuration fields that give a tiny model the layers of `chosen_layers`."""
    chosen = chosen_layers(args, config, kinds)
    experts, letters = layers_with_experts(args), letters_of(args)
    changes: dict[str, Any] = {"num_layers": len(chosen)}
    if SPARSE in letters:
        # fewer keys than a tiny batch row has; with relu scores are equal, and Megatron selects any
        changes |= {"dsa_indexer_topk": STATE, "dsa_indexer_scoring_relu": False}
    changes["moe_layer_freq"] = [experts[layer - 1] for layer in chosen] if experts else 1
    if letters and not pattern_of(args):
        changes["linear_attention_freq"] = [int(letters[at - 1] in RECURRENT) for at in chosen]
    # Layers that predict further tokens count from 1 again, and Megatron looks them up in the same
    # lists.
    depth = max(
        getattr(args, "mtp_num_layers", None) or 0, *map(len, pattern_of(args).split("/")[1:]), 0
    )
    numbered = [*chosen, *range(len(chosen) + 1, depth + 1)]
    types = comm_types.types_by_layer(args)
    changes["cp_comm_type"] = (
        [comm_types.type_of(args, layer) for layer in numbered] if len(types) > 1 else types[0]
    )
    if args.window_size is not None:
        window = max(kinds, key=lambda kind: kind.probed[0]).probed
        narrow = [int(declared_window(config, layer)[0] >= 0) for layer in numbered]
        changes |= {"window_size": window, "window_attn_skip_freq": narrow}
    return changes | _recurrent(args, config, tp)


def tiny_pattern(args: argparse.Namespace, chosen: list[int]) -> dict[str, str]:
    """Return the pattern of the chosen layers under the argument names that the job uses, with one
    layer of each kind that predicts tokens; {} without a pattern.
    """
    pattern = pattern_of(args)
    if not pattern:
        return {}
    letters, (_, *further) = main_layers(pattern), pattern.split("/")
    kept = ["".join(dict.fromkeys(part)) for part in further]
    tiny = "/".join(["".join(letters[layer - 1] for layer in chosen), *kept])
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
