"""Runs Mamba and gated delta net layers with --cp-ring-layout contiguous and balanced, and with
documents.

These layers exchange tokens for heads, so that each rank holds whole batch rows of some heads.
Megatron then puts the tokens in sequence order, and back, for its zigzag split. This patch uses the
order of the layout, and the state restarts at each document.

GPT models of gated delta net layers can predict further tokens. Megatron's scripts build such
models; its package does not. Before 0.19 a GPT model with gated delta net layers cannot be built
under context parallelism, because these layers get attention's type of communication.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from cp_ring.megatron.flags.asked import Asked
from cp_ring.megatron.flags.layer_pattern import letters_of
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import around, loaded_modules
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


def _replacements() -> Iterator[Replacement]:
    import megatron.core.ssm.mamba_context_parallel  # noqa: F401
    from megatron.core.ssm.mamba_mixer import MambaMixer

    from cp_ring.megatron.adapter import recurrent

    yield from _of_gated_delta_net()
    modules = loaded_modules("megatron.core.ssm")
    yield from replace_everywhere(modules, "_undo_attention_load_balancing", recurrent.in_sequence)
    yield from replace_everywhere(modules, "_redo_attention_load_balancing", recurrent.by_rank)
    yield MambaMixer, "_ssm_training", recurrent.mamba_with_documents(MambaMixer._ssm_training)


def _of_gated_delta_net() -> Iterator[Replacement]:
    from megatron.core.models.gpt import gpt_layer_specs

    from cp_ring.megatron.adapter import recurrent

    package: Any = importlib.import_module("megatron.core.ssm.gated_delta_net")
    wrappers = {
        "__init__": _without_type,
        "forward": recurrent.gated_delta_net_with_documents,
        "_gated_norm_and_a2a": recurrent.norm_with_documents,
    }
    for layer in (package.GatedDeltaNet, getattr(package, "GatedDeltaNet2", None)):
        for name, wrap in wrappers.items():
            if hasattr(layer, name) and layer is not None:
                yield layer, name, wrap(getattr(layer, name))
    modules = loaded_modules(package.__name__)
    for name in ("causal_conv1d", "chunk_gated_delta_rule", "chunk_gdn2"):
        if getattr(package, name, None) is not None:
            yield from replace_everywhere(
                modules, name, recurrent.fla_with_documents(getattr(package, name))
            )
    layers = _of_variant(gpt_layer_specs.get_gpt_decoder_layer_specs)
    yield from replace_everywhere(loaded_modules("megatron"), layers.__name__, layers)


@around
def _of_variant(specs: Any, config: Any, **kwargs: Any) -> list[Any]:
    """Return the layers of the decoder; the last one also serves the further predictions."""
    if config.experimental_attention_variant is None:
        return specs(config, **kwargs)
    variants = importlib.import_module(
        "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    )
    return variants.get_transformer_layer_with_experimental_attention_variant_spec(config)


@around
def _without_type(constructor: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    if "cp_comm_type" not in inspect.signature(constructor).parameters:  # before 0.19
        kwargs.pop("cp_comm_type", None)
    constructor(layer, *args, **kwargs)


def _needed(args: Asked, options: Options) -> bool:
    """Return True if layers may be recurrent. A program may have any layers, with tokens in another
    order or with documents.
    """
    moved = not options.named_layout.stock or options.document_mask or options.kinds or args.packed
    return options.enabled and bool(letters_of(args) or (args.program and moved))


PATCH = Patch(
    what="Mamba and gated delta net layers take the order of tokens from --cp-ring-layout and "
    "restart their state at each document; models of gated delta net layers can predict further "
    "tokens",
    why="Megatron's layers know only the order of the zigzag split, and documents only in thd; "
    "its package does not build models of gated delta net layers with further predictions",
    needed=_needed,
    replacements=_replacements,
)
