"""Builds the GPT model that the flags describe, for Megatron before 0.19, whose training loop leaves that to the script."""

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


def build(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The part of the model that one pipeline stage holds; the signature is what Megatron's `get_model` calls.

    Raises `ConfigError` for a kind of model that needs a later Megatron.
    """
    args = get_args()
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if getattr(args, name, None):
            raise ConfigError(f"--{name.replace('_', '-')} needs megatron-core 0.19 with cp_ring.pretrain_gpt")
    config = config or core_transformer_config_from_args(args)
    layers = _layer_spec(args, config, vp_stage)
    wanted = {
        "config": config,
        "transformer_layer_spec": layers,
        "mtp_block_spec": _mtp_spec(args, config, layers, vp_stage),
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "vp_stage": vp_stage,
        "pg_collection": pg_collection,
    }
    return GPTModel(**compat.known_arguments(GPTModel, wanted))


def _layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        spec = import_module(args.spec)
        return spec(config) if inspect.isfunction(spec) else spec
    options = {"normalization": args.normalization, "qk_l2_norm": getattr(args, "qk_l2_norm", False), "vp_stage": vp_stage}
    block = gpt_layer_specs.get_gpt_decoder_block_spec
    return block(
        config, use_transformer_engine=args.transformer_impl == "transformer_engine", **compat.known_arguments(block, options)
    )


def _mtp_spec(args: argparse.Namespace, config: Any, layers: Any, vp_stage: int | None) -> Any:
    """The layers that predict more tokens, each like the last one of `layers`; None without --mtp-num-layers."""
    if args.mtp_num_layers is None:
        return None
    block = gpt_layer_specs.get_gpt_mtp_block_spec
    if not getattr(layers, "layer_specs", [layers]):  # this stage has none
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config, args.transformer_impl == "transformer_engine", args.normalization
        )[-1]
    return block(config, layers, use_transformer_engine=args.transformer_impl == "transformer_engine", vp_stage=vp_stage)
