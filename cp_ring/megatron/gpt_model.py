"""Builds the GPT or hybrid model of the flags, for Megatron before 0.19, whose training loop leaves
that to the script.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from cp_ring.errors import ConfigError
from cp_ring.megatron import compat
from cp_ring.megatron.flags.layer_pattern import PATTERNS, pattern_of


def build(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The part of the model that one pipeline stage holds; the signature is what Megatron's
    `get_model` calls.

    Raises `ConfigError` for a hybrid model without a specification of its layers.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    common = {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "vp_stage": vp_stage,
        "pg_collection": pg_collection,
    }
    if pattern_of(args):
        return _build_hybrid(args, common)
    layers = _layer_spec(args, config, vp_stage)
    wanted = common | {
        "transformer_layer_spec": layers,
        "mtp_block_spec": _mtp_spec(args, config, layers, vp_stage),
        "rope_scaling": args.use_rope_scaling,
    }
    return GPTModel(**compat.known_arguments(GPTModel, wanted))


def _build_hybrid(args: argparse.Namespace, common: dict[str, Any]) -> Any:
    """A model of layers by the letters of a pattern: `HybridModel`, or `MambaModel` before 0.18."""
    if args.spec is None:
        raise ConfigError(
            "--hybrid-layer-pattern, --hybrid-override-pattern: Megatron before 0.19 needs --spec "
            "with their layers"
        )
    spec = import_module(args.spec)
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
    wanted = common | {"hybrid_stack_spec": spec, "mamba_stack_spec": spec}
    wanted |= {name: getattr(args, name) for name in PATTERNS if getattr(args, name, None)}
    if wanted.get("hybrid_layer_pattern"):
        wanted.pop("hybrid_override_pattern", None)  # the older name of the same
    return Model(**compat.known_arguments(Model, wanted))


def _layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        spec = import_module(args.spec)
        return spec(config) if inspect.isfunction(spec) else spec
    if hasattr(config, "per_block_parameters"):
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        return get_gpt_heterogeneous_layer_spec(
            config, args.transformer_impl == "transformer_engine", vp_stage=vp_stage
        )
    options = {
        "normalization": args.normalization,
        "qk_l2_norm": getattr(args, "qk_l2_norm", False),
        "vp_stage": vp_stage,
    }
    block = gpt_layer_specs.get_gpt_decoder_block_spec
    return block(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        **compat.known_arguments(block, options),
    )


def _mtp_spec(args: argparse.Namespace, config: Any, layers: Any, vp_stage: int | None) -> Any:
    """The layers that predict more tokens, each like the last one of `layers`; None without
    --mtp-num-layers.
    """
    if args.mtp_num_layers is None:
        return None
    block = gpt_layer_specs.get_gpt_mtp_block_spec
    if not getattr(layers, "layer_specs", [layers]):  # this stage has none
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config, args.transformer_impl == "transformer_engine", args.normalization
        )[-1]
    return block(
        config,
        layers,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
    )
