"""Finds which layers of a model have attention: in hybrid layer patterns, GPT models with linear
attention, and Megatron's heterogeneous layers.
"""

from __future__ import annotations

import argparse
from typing import Any

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's argument, and its older name."""

RECURRENT = {"M": "Mamba", "G": "gated delta net", "K": "Kimi delta attention"}
"""Letters of recurrent layers, whose state runs along the sequence."""

LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
"""Numbers of heads that Megatron divides among context-parallel ranks, and states do not."""

_ATTENTION = "*+"
SPARSE = "D"
"""The letter of sparse attention (--experimental-attention-variant dsa), which Megatron splits."""

VARIANTS = {"gated_delta_net": "G", "gdn": "G", "gdn2": "G", "kda": "K", "dsa": SPARSE}
"""The letter of each value of --experimental-attention-variant. Since 0.20, gdn means
gated_delta_net.
"""


def pattern_of(args: Any) -> str:
    """Return the hybrid layer pattern of the flags, or ""."""
    return next((str(pattern) for name in PATTERNS if (pattern := getattr(args, name, None))), "")


def letters_of(args: Any) -> str:
    """Return one letter for each layer of the job, or "" if all layers have attention. The letters
    come from the hybrid layer pattern; for a GPT model they come from
    --experimental-attention-variant and --linear-attention-freq, such as G G G * for Qwen3-Next.
    """
    letter = VARIANTS.get(getattr(args, "experimental_attention_variant", None) or "")
    every = getattr(args, "linear_attention_freq", None)
    pattern = pattern_of(args)
    if letter == SPARSE and not pattern:
        return SPARSE * (args.num_layers or 0)
    if pattern or not letter or not every:
        return pattern
    linear = (
        [(layer + 1) % every > 0 for layer in range(args.num_layers or 0)]
        if isinstance(every, int)
        else every
    )
    return "".join(letter if each else "*" for each in linear)


def shown_pattern(args: Any) -> str:
    """Return the flag that gives `letters_of`, with its value, such as `--hybrid-layer-pattern
    M*M-`; "" without one.
    """
    return next(
        (
            f"--{name.replace('_', '-')} {value}"
            for name in (*PATTERNS, "experimental_attention_variant")
            if (value := getattr(args, name, None))
        ),
        "",
    )


def main_layers(pattern: str) -> str:
    """Return the letters of a pattern's layers, without the borders of pipeline stages and without
    the layers that predict further tokens.
    """
    return pattern.split("/")[0].replace("|", "")


def attention_layers(args: argparse.Namespace, config: Any = None) -> list[int]:
    """Return the numbers, counted from 1, of the layers with attention. `config` is Megatron's, if
    it exists.
    """
    letters = letters_of(args)
    if letters:
        return [
            number for number, letter in enumerate(main_layers(letters), 1) if letter in _ATTENTION
        ]
    blocks = getattr(config, "per_block_parameters", None)
    if blocks is None:
        return list(range(1, args.num_layers + 1))
    return [number for number, block in enumerate(blocks, 1) if attends(block)]


def expert_layers(args: argparse.Namespace) -> list[int]:
    """Return 1 for each layer of a GPT model that has experts by `--moe-layer-freq`, and 0 for each
    other layer.
    """
    every = getattr(args, "moe_layer_freq", None) or 1
    if isinstance(every, int):
        return [int(layer % every == 0) for layer in range(args.num_layers)]
    return list(every)


def predicting_layers(args: argparse.Namespace) -> list[int]:
    """Return the numbers of the attention layers that predict further tokens, counted from 1 in
    each part of `letters_of`. In a GPT model each of them equals the last main layer.
    """
    letters = letters_of(args)
    parts = letters.split("/")[1:]
    if letters and not pattern_of(args):
        parts = [letters[-1] * (getattr(args, "mtp_num_layers", None) or 0)]
    return [
        number for part in parts for number, letter in enumerate(part, 1) if letter in _ATTENTION
    ]


def attends(block: Any) -> bool:
    """Return True if a heterogeneous block (Megatron's `TransformerBlockConfig`) has attention, not
    a linear layer or nothing in its place.
    """
    return not (block.attention.no_op or block.attention.replace_with_linear)


def config_of_layer(config: Any, layer: int) -> Any:
    """Return the configuration of layer `layer`, counted from 1; heterogeneous layers have their
    own numbers of key/value heads.
    """
    return config.get_config_for_layer(layer) if hasattr(config, "per_block_parameters") else config
