"""Runs Mamba and gated delta net layers in every layout, with documents and with branches.

Megatron's layers exchange tokens for heads, so that each rank holds whole batch rows of some heads,
and put the tokens in sequence order for its zigzag split. This patch has a forward pass of its own
for training, which exchanges heads or states, in the order of the layout; the state restarts at
each document, and forks at branches.

GPT models of gated delta net layers can predict further tokens. Megatron's scripts build such
models; its package does not. Before 0.19 a GPT model with gated delta net layers cannot be built
under context parallelism, because these layers get attention's type of communication.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any

from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.flags.layer_pattern import LINEAR_HEADS, letters_of
from cp_ring.megatron.options import Options
from cp_ring.megatron.settings import current
from cp_ring.megatron.wrapping import Function, around, replaced
from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from cp_ring.megatron.adapter import recurrent

    kinds = (
        ("mamba_mixer.MambaMixer", "M", recurrent.mamba),
        ("gated_delta_product.GatedDeltaProductMixer", "M", recurrent.gated_delta_product),
        ("gated_delta_net.GatedDeltaNet", "G", recurrent.gated_delta_net),
        ("gated_delta_net.GatedDeltaNet2", "G", recurrent.gated_delta_net),
        ("gated_delta_net.KimiDeltaAttention", "K", recurrent.kimi_delta_attention),
    )
    for name, letter, train in kinds:
        with suppress(ImportError, AttributeError):  # versions differ
            layer = resolve_name(f"megatron.core.ssm.{name}")
            yield layer, "__init__", around(partial(recurrent.build, letter))(layer.__init__)
            yield layer, "forward", around(partial(recurrent.run, train))(layer.forward)


def _of_any_heads(check: Function, config: Any) -> None:
    """Check the configuration as if each rank had heads of its own, which states do not need."""
    heads = [
        (config, name, count * config.context_parallel_size)
        for name in LINEAR_HEADS
        if (count := getattr(config, name, None)) and current().recurrent != "heads"
    ]
    with replaced(*heads):
        check(config)


def _of_variant(specs: Function, config: Any, **kwargs: Any) -> list[Any]:
    """Return the layers of the decoder; the last one also serves the further predictions."""
    if config.experimental_attention_variant is None:
        return specs(config, **kwargs)
    variants = importlib.import_module(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    )
    return variants.get_transformer_layer_with_experimental_attention_variant_spec(config)


def _needed(args: Asked, options: Options) -> bool:
    """Return True if layers may be recurrent. A program may have any layers."""
    return options.enabled and bool(letters_of(args) or args.program)


PATCH = Patch(
    what="Mamba and gated delta net layers exchange heads or states, take the order of tokens from "
    "--cp-ring-layout, restart their state at each document and fork it at branches; models of "
    "gated delta net layers can predict further tokens",
    why="Megatron's layers know only the order of the zigzag split, and documents only in thd; "
    "its package does not build models of gated delta net layers with further predictions",
    needed=_needed,
    wraps={
        "megatron.core.transformer.transformer_config."
        "TransformerConfig.__post_init__": _of_any_heads,
        "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_layer_specs": _of_variant,
    },
    replacements=_replacements,
)
