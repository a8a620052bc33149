"""A tiny model made from a job's flags, and Megatron's global state for it."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron import settings
from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.tiny_layers import (
    blocks_of,
    changes_of_blocks,
    changes_of_layers,
    sharing_of,
)
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.layer_pattern import pattern_of
from cp_ring.megatron.wrapping import replaced

VOCABULARY = 128
HIDDEN = 64
EXPERTS = 4
PACKING = ("sft", "dataloader_inter_document_masking")
"""Arguments with which the batches of Megatron's scripts are packed."""
_NONE = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_virtual_stages_per_pipeline_rank",
    "fp8",
    "fp4",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "embedding_init_method_std",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_input_jitter_eps",
    "inference_cuda_graph_scope",
)
"""Arguments that a tiny model has no value of."""
_OFF = (
    "bf16",
    "fp16",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "check_for_nan_in_loss_and_grad",
    "gradient_accumulation_fusion",
    "tp_comm_overlap",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "init_model_with_meta_device",
    "moe_shared_expert_overlap",
    "fp8_param_gather",
    "overlap_moe_expert_parallel_comm",
    "check_for_spiky_loss",
    "moe_grouped_gemm",
    "log_num_zeros_in_grad",
    "moe_pad_expert_input_to_capacity",
    "enable_cuda_graph",
    "external_cuda_graph",
    "delay_wgrad_compute",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_layer_recompute",
    "moe_permute_fusion",
    "moe_router_fusion",
)
"""Flags that a tiny model does not have."""


def tiny_args(
    args: argparse.Namespace, kinds: list[LayerKind], batch_size: int
) -> argparse.Namespace:
    """The job's arguments with one small layer of each kind, in float32, without pipeline stages;
    with experts if it has them.
    """
    tp, config = args.tensor_model_parallel_size, transformer_config(args)
    sharing = sharing_of(config)
    groups = _key_heads(args, sharing)
    changes: dict[str, Any] = {
        "hidden_size": HIDDEN * tp,
        "ffn_hidden_size": 2 * HIDDEN * tp,
        "num_attention_heads": groups * sharing,
        "num_query_groups": groups if args.group_query_attention else args.num_query_groups,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY * tp,
        "seq_length": kinds[0].tokens,
        "micro_batch_size": batch_size,
        # A table of positions is as long as the job's: a microbatch of that length is probed too.
        "max_position_embeddings": max(kinds[0].tokens, args.seq_length or 0),
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "perform_initialization": True,  # also where the program loads its weights
        "init_method_std": HIDDEN**-0.5,
        "params_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_dtype": None,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "cuda_graph_scope": [],
    }
    off = _OFF if kinds[0].mask == "packed" else _OFF + PACKING
    changes |= dict.fromkeys(_NONE) | dict.fromkeys(off, False) | _experts(args)
    changes |= changes_of_layers(args, config, kinds, tp)
    changes |= changes_of_blocks(args, config, kinds, groups * sharing, 2 * HIDDEN * tp)
    kept = {name: value for name, value in changes.items() if hasattr(args, name)}
    return with_changes(args, kept)


def name_of(args: argparse.Namespace, model: Any) -> str:
    """What a tiny model is called in messages, as in `tiny model of 2 layers` or
    `tiny model of layers M*-`.
    """
    pattern = pattern_of(args)
    if pattern:
        return f"tiny model of layers {pattern}"
    count = len(getattr(getattr(model, "decoder", None), "layers", ())) or args.num_layers
    return f"tiny model of {count} layer{'s' * (count > 1)}"


def with_changes(args: argparse.Namespace, changes: dict[str, Any]) -> argparse.Namespace:
    """A copy of the arguments with `changes`, which the configuration of a program without a
    command line follows.
    """
    changed = argparse.Namespace(**(vars(args) | changes))
    if hasattr(args, "transformer_config"):
        changed.transformer_config = _resized(args.transformer_config, changed)
    return changed


def _resized(config: Any, values: argparse.Namespace) -> Any:
    """A copy of a `TransformerConfig` with those of its fields that `values` has."""
    from megatron.core.utils import init_method_normal  # heavy, and installed with Megatron only

    resized = copy.copy(config)
    for name in vars(config):
        if hasattr(values, name):
            setattr(resized, name, getattr(values, name))
    # of the model and the optimizer that the program has made already
    for name in ("finalize_model_grads", "no_sync", "grad_sync", "param_sync", "grad_scale"):
        setattr(resized, f"{name}_func", None)
    if hasattr(config, "per_block_parameters"):
        resized.per_block_parameters = blocks_of(resized)
    resized.init_method = resized.output_layer_init_method = init_method_normal(
        resized.init_method_std
    )
    return resized


def transformer_config(args: argparse.Namespace) -> Any:
    """Megatron's configuration of the model: that which the program made, else that of the
    arguments.
    """
    if hasattr(args, "transformer_config"):
        return args.transformer_config
    # users of megatron.core alone may lack it
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


def _experts(args: argparse.Namespace) -> dict[str, Any]:
    """A few small experts on each rank, if the job has experts. Their auxiliary losses have weight
    1, so that it matters.
    """
    count = getattr(args, "num_experts", None)
    if not count:
        names = (
            "num_experts",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "expert_tensor_parallel_size",
        )
        return dict.fromkeys(names)
    tp, shared = args.tensor_model_parallel_size, args.moe_shared_expert_intermediate_size
    weights, balance = args.moe_aux_loss_coeff, args.moe_router_load_balancing_type
    return {
        "num_experts": min(count, max(EXPERTS, args.moe_router_topk)),
        "moe_ffn_hidden_size": HIDDEN * tp,
        "moe_shared_expert_intermediate_size": HIDDEN * tp if shared else None,
        "expert_tensor_parallel_size": tp,
        "expert_tensor_parallel_num_weight_shards": tp,
        "moe_token_dispatcher_type": "allgather",
        # Megatron defines both by the tokens of a rank, so that another cp size is another model.
        "moe_expert_capacity_factor": None,
        "moe_router_load_balancing_type": "none" if "sinkhorn" in balance else balance,
        "moe_aux_loss_coeff": (
            [float(x > 0) for x in weights] if isinstance(weights, list) else float(weights > 0)
        ),
        # Experts with biases fail in Megatron where one rank has all of them: it adds a bias in
        # place to a view.
        "add_bias_linear": args.add_bias_linear and tp > 1,
    }


def _key_heads(args: argparse.Namespace, sharing: int) -> int:
    """Key/value heads of a tiny model: two for each tensor-parallel rank, or as many as ranks need
    that exchange heads.
    """
    tp, all_heads = args.tensor_model_parallel_size, args.num_attention_heads // sharing
    needed = lcm(*(spec.ulysses for _, spec in comm_types.specs(args, settings.current())))
    fitting = (
        groups for groups in range(2 * tp, all_heads, tp) if groups * sharing // tp % needed == 0
    )
    return min(all_heads, next(fitting, all_heads))


def uncovered(args: argparse.Namespace) -> str:
    """Why no tiny model can be made from these flags, or ""."""
    if hasattr(args, "transformer_config") and args.build is None:
        return "a program that does not call cp_ring.megatron.certify"
    if isinstance(transformer_config(args).window_size, int):
        return "layers whose core attention class sets their window"
    return "models from a YAML file" if getattr(args, "yaml_cfg", None) else ""


def own_device() -> torch.device:
    """Where this rank computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def build(args: argparse.Namespace) -> Any:
    """The model of `args` with all its layers, on this rank's device."""
    from megatron.core import tensor_parallel

    if hasattr(args, "transformer_config"):
        return args.build(args.transformer_config).to(own_device())
    try:
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
    except ImportError:
        from cp_ring.megatron.gpt_model import build as build_from_flags

        model = build_from_flags()
    else:
        from megatron.core.process_groups_config import ProcessGroupCollection

        config = hybrid_config_from_args(args) if pattern_of(args) else gpt_config_from_args(args)
        builder = config.get_builder_cls()(config)
        model = builder.build_model(
            ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
        )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.to(own_device())


@contextmanager
def arguments_in_force(args: argparse.Namespace, groups: dict[str, Any]) -> Iterator[None]:
    """Replaces Megatron's global arguments, timers and process groups, and afterwards restores
    them.
    """
    from megatron.core import Timers, parallel_state

    changes = [
        (parallel_state, name, value)
        for name, value in groups.items()
        if hasattr(parallel_state, name)
    ]
    if not hasattr(args, "transformer_config"):
        from megatron.training import global_vars  # users of megatron.core alone may lack it

        changes += [
            (global_vars, "_GLOBAL_ARGS", args),
            (global_vars, "_GLOBAL_TIMERS", Timers(0, "minmax")),
        ]
    with replaced(*changes):
        yield


def one_stage(alone: Any) -> dict[str, Any]:
    """The parallel state of a rank that holds every stage and every expert of its model."""
    from megatron.core import parallel_state

    pipeline = "PIPELINE_MODEL_PARALLEL"
    stage: dict[str, Any] = dict.fromkeys(
        (f"_{kind}_GROUP" for kind in (pipeline, "EMBEDDING", "POSITION_EMBEDDING")), alone
    )
    for kind in ("PIPELINE", "EMBEDDING", "POSITION_EMBEDDING"):
        stage[f"_{kind}_GLOBAL_RANKS"] = [dist.get_rank()]
    for kind in ("MPU", "VIRTUAL"):
        stage[f"_{kind}_{pipeline}_RANK"] = stage[f"_{kind}_{pipeline}_WORLD_SIZE"] = None
    return stage | _experts_everywhere(
        alone, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


def _experts_everywhere(alone: Any, data: Any) -> dict[str, Any]:
    """The parallel state of a rank that holds all experts, as other parameters; `data` are the
    ranks that hold the same.
    """
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_group()
    of_tensor = ("TENSOR", "TENSOR_AND_MODEL", "TENSOR_MODEL_PIPELINE")
    groups = {f"_EXPERT_{name}_PARALLEL_GROUP": tensor for name in of_tensor} | {
        "_EXPERT_MODEL_PARALLEL_GROUP": alone
    }
    return groups | dict.fromkeys(
        ("_EXPERT_DATA_PARALLEL_GROUP", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"), data
    )


def one_rank(alone: Any) -> dict[str, Any]:
    """As `one_stage`, and with whole batch rows and batches: context and data parallel size 1."""
    from megatron.core import parallel_state

    data = [
        name
        for name in vars(parallel_state)
        if "DATA_PARALLEL_GROUP" in name
        and not ("EXPERT" in name or "GLOO" in name or name.startswith("_TENSOR"))
    ]
    groups = dict.fromkeys((*data, "_CONTEXT_PARALLEL_GROUP"), alone) | {
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [dist.get_rank()]
    }
    tensor = parallel_state.get_tensor_model_parallel_group()
    both = (
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        "_TENSOR_AND_DATA_PARALLEL_GROUP",
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    )
    return (
        one_stage(alone) | groups | dict.fromkeys(both, tensor) | _experts_everywhere(alone, alone)
    )
