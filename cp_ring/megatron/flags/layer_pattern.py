"""Which layers of a model attend: of the hybrid layer pattern in the flags, and of Megatron's
heterogeneous layers.
"""

from __future__ import annotations

import argparse
from typing import Any

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's argument, and its older name."""

RECURRENT = {"M": "Mamba", "G": "gated delta net"}
"""Letters of layers whose state runs along the sequence."""

_ATTENTION = "*+D"


def pattern_of(args: argparse.Namespace) -> str:
    """The hybrid layer pattern of the flags, "" without one."""
    return next((str(pattern) for name in PATTERNS if (pattern := getattr(args, name, None))), "")


def shown_pattern(args: argparse.Namespace) -> str:
    """The flag of the hybrid layer pattern with its value, as in `--hybrid-layer-pattern M*M-`; ""
    without one.
    """
    return next(
        (
            f"--{name.replace('_', '-')} {pattern}"
            for name in PATTERNS
            if (pattern := getattr(args, name, None))
        ),
        "",
    )


def main_layers(pattern: str) -> str:
    """The letters of the layers of a pattern, without borders of pipeline stages and layers that
    predict further tokens.
    """
    return pattern.split("/")[0].replace("|", "")


def attention_layers(args: argparse.Namespace, config: Any = None) -> list[int]:
    """The numbers, from 1, of the layers that attend. `config` is Megatron's, where it exists."""
    pattern = pattern_of(args)
    if pattern:
        return [
            number for number, letter in enumerate(main_layers(pattern), 1) if letter in _ATTENTION
        ]
    blocks = getattr(config, "per_block_parameters", None)
    if blocks is None:
        return list(range(1, args.num_layers + 1))
    return [number for number, block in enumerate(blocks, 1) if attends(block)]


def predicting_layers(args: argparse.Namespace) -> list[int]:
    """The numbers, from 1 in each part, of the attention layers of a hybrid pattern that predict
    further tokens.
    """
    parts = pattern_of(args).split("/")[1:]
    return [
        number for part in parts for number, letter in enumerate(part, 1) if letter in _ATTENTION
    ]


def attends(block: Any) -> bool:
    """Whether a heterogeneous block (Megatron's `TransformerBlockConfig`) has attention, and not a
    linear layer or nothing.
    """
    return not (block.attention.no_op or block.attention.replace_with_linear)


def config_of_layer(config: Any, layer: int) -> Any:
    """The configuration of layer `layer`, from 1: heterogeneous layers have their own numbers of
    key/value heads.
    """
    return config.get_config_for_layer(layer) if hasattr(config, "per_block_parameters") else config
