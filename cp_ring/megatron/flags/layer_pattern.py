"""Which layers of a model attend: of the hybrid layer pattern in the flags, of GPT models with
linear attention, and of Megatron's heterogeneous layers.
"""

from __future__ import annotations

import argparse
from typing import Any

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's argument, and its older name."""

RECURRENT = {"M": "Mamba", "G": "gated delta net"}
"""Letters of layers whose state runs along the sequence."""


_RECURRENT_CLASSES = {"MambaMixer", "GatedDeltaNet", "GatedDeltaNet2"}
"""Megatron's, by name."""

_ATTENTION = "*+"
SPARSE = "D"
"""The letter of sparse attention (--experimental-attention-variant dsa), which is split by itself.
"""

VARIANTS = {"gated_delta_net": "G", "gdn": "G", "gdn2": "G", "dsa": SPARSE}
"""Of --experimental-attention-variant: their letters. Since 0.20 gdn is the name of the first."""


def pattern_of(args: Any) -> str:
    """The hybrid layer pattern of the flags, "" without one."""
    return next((str(pattern) for name in PATTERNS if (pattern := getattr(args, name, None))), "")


def letters_of(args: Any) -> str:
    """A letter for each layer of the job, "" where all of them attend: its hybrid layer pattern,
    or, as in G G G * of Qwen3-Next, those that --experimental-attention-variant and
    --linear-attention-freq give the attention of a GPT model.
    """
    letter = VARIANTS.get(getattr(args, "experimental_attention_variant", None) or "")
    every, pattern = getattr(args, "linear_attention_freq", None), pattern_of(args)
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
    """The flag from which `letters_of` are, with its value, as in `--hybrid-layer-pattern M*M-`; ""
    without one.
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
    """The letters of the layers of a pattern, without borders of pipeline stages and layers that
    predict further tokens.
    """
    return pattern.split("/")[0].replace("|", "")


def attention_layers(args: argparse.Namespace, config: Any = None) -> list[int]:
    """The numbers, from 1, of the layers that attend. `config` is Megatron's, where it exists."""
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
    """Of each layer of a GPT model with experts 1 if it has them by `--moe-layer-freq`, else 0."""
    every = getattr(args, "moe_layer_freq", None) or 1
    if isinstance(every, int):
        return [int(layer % every == 0) for layer in range(args.num_layers)]
    return list(every)


def predicting_layers(args: argparse.Namespace) -> list[int]:
    """The numbers, from 1 in each part, of the attention layers of `letters_of` that predict
    further tokens. In a GPT model each of these is like the last one of the others.
    """
    letters = letters_of(args)
    parts = letters.split("/")[1:]
    if letters and not pattern_of(args):
        parts = [letters[-1] * (getattr(args, "mtp_num_layers", None) or 0)]
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


def is_recurrent(layer: Any) -> bool:
    """Whether a module is a layer whose state runs along the sequence."""
    return any(each.__name__ in _RECURRENT_CLASSES for each in type(layer).__mro__)
