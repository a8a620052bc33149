"""Builds the GPT or hybrid model of the flags. Megatron-core 0.18 has no description of a GPT
model, and its training loop expects the script to build it.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import import_module
from megatron.training import argument_utils, get_args
from megatron.training.argument_utils import core_transformer_config_from_args


def described(args: argparse.Namespace, config: Any = None) -> Any:
    """Return Megatron's description of the model of the flags; None for a GPT model before 0.19.

    config: the `TransformerConfig`; by default the one of the flags.
    """
    hybrid = args.hybrid_layer_pattern is not None
    name = "hybrid_config_from_args" if hybrid else "gpt_config_from_args"
    make = getattr(argument_utils, name, None)
    return make and make(args, config)


def build(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build the part of the model that one pipeline stage holds. Megatron's `get_model` calls it
    with this signature.
    """
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    model = described(args, config)
    if model is not None:
        return model.get_builder_cls()(model).build_model(
            pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
    layers = _layer_spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=_mtp_spec(args, config, layers, vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        spec = import_module(args.spec)
        return spec(config) if inspect.isfunction(spec) else spec
    with_te = args.transformer_impl == "transformer_engine"
    if hasattr(config, "per_block_parameters"):
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        return get_gpt_heterogeneous_layer_spec(config, with_te, vp_stage=vp_stage)
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_te,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )


def _mtp_spec(args: argparse.Namespace, config: Any, layers: Any, vp_stage: int | None) -> Any:
    """Return the specification of the layers that predict further tokens, each like the last one of
    `layers`; None without --mtp-num-layers.
    """
    if args.mtp_num_layers is None:
        return None
    with_te = args.transformer_impl == "transformer_engine"
    if not getattr(layers, "layer_specs", [layers]):  # this stage has no layers
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(config, with_te, args.normalization)[
            -1
        ]
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=with_te, vp_stage=vp_stage
    )
