"""Makes a tiny model from a job's flags, with as many of the job's first layers as show each kind,
and Megatron's global state for it. A hybrid model has layers by the letters of its pattern.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.certificate.batch import VOCABULARY, Batch, own_device
from cp_ring.megatron.certificate.layer_kinds import LayerKind, unit_of
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.layer_pattern import (
    PATTERNS,
    SPARSE,
    attends,
    expert_layers,
    letters_of,
    main_layers,
    pattern_of,
)
from cp_ring.megatron.rejection import megatrons_rejections
from cp_ring.megatron.wrapping import replaced

BY_LAYER = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "cp_comm_type")
STATE = 16  # channels of a head of a recurrent layer, and of its state
SIZES_OF_STATES = "mamba_head_dim mamba_state_dim linear_key_head_dim linear_value_head_dim"
HIDDEN = 64
CHECKS = ("check_for_nan_in_loss_and_grad", "check_for_spiky_loss")
PACKING = ("sft", "dataloader_inter_document_masking")
"""Arguments with which Megatron's scripts pack their batches."""

KEPT = """
    tensor_model_parallel_size sequence_parallel context_parallel_size
    hierarchical_context_parallel_sizes use_cpu_initialization transformer_impl attention_backend
    recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
    create_attention_mask_in_dataloader
    kv_channels softmax_scale softmax_type window_size qk_layernorm qk_l2_norm
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rope_type mrope_section apply_rope_fusion activation_func
    moe_router_topk moe_aux_loss_coeff moe_z_loss_coeff calculate_per_token_loss mtp_num_layers
    heterogeneous_block_specs is_hybrid_model mamba_num_groups experimental_attention_variant
    linear_conv_kernel_dim linear_num_key_heads linear_num_value_heads
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_loss_coeff
"""
"""Fields of the job's `TransformerConfig` that its tiny model keeps, because context parallelism
depends on them, or layer specifications do. Other fields have Megatron's default.
"""


def arguments_of_microbatch(batch: Batch) -> dict[str, Any]:
    """Return the arguments with which a forward step takes this microbatch."""
    off = CHECKS + (PACKING if batch.mask != "packed" else ())
    b, n = batch.shape
    return {"micro_batch_size": b, "seq_length": n} | dict.fromkeys(off, False)


def tiny_args(
    args: argparse.Namespace, config: Any, kinds: list[LayerKind]
) -> tuple[argparse.Namespace, Any]:
    """Return the job's arguments with the sizes of a tiny model and the first layers, which show
    each kind, in float32, without pipeline stages; and the configuration of the model.
    """
    tiny = _tiny_config(args, config, kinds)
    tokens = max([unit_of(args), *(kind.tokens for kind in kinds)])
    changes = vars(tiny) | {
        "seq_length": tokens,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY * args.tensor_model_parallel_size,
        "num_experts": tiny.num_moe_experts,
        # The table of positions keeps the job's length, because a microbatch of that length is
        # probed too.
        "max_position_embeddings": max(args.seq_length or 0, tokens),
        **tiny_pattern(args, tiny.num_layers),
    }
    if hasattr(config, "per_block_parameters"):
        changes["per_block_parameters"] = [_one_block(config, tiny)] * tiny.num_layers
    # a program may have fields of its own, such as the length of a batch row
    return with_changes(args, changes), with_changes(config, changes)


def _one_block(config: Any, tiny: Any) -> Any:
    """Return a heterogeneous block of the job that has attention and an MLP, in the sizes of the
    tiny model.
    """
    block = copy.deepcopy(next(filter(attends, config.per_block_parameters)))
    block.attention.num_query_groups = tiny.num_query_groups
    block.mlp.no_op = block.mlp.replace_with_linear = False
    block.mlp.ffn_hidden_size = tiny.ffn_hidden_size
    return block


def _tiny_config(args: argparse.Namespace, config: Any, kinds: list[LayerKind]) -> Any:
    """Return a new configuration of Megatron with the `KEPT` fields of the job's, its first layers,
    small sizes that the ranks can share as they share the job's, and the recomputation that
    concerns attention.
    """
    # slow to import, and installed with Megatron only
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    made = MLATransformerConfig if config.multi_latent_attention else TransformerConfig
    tp, letters = config.tensor_model_parallel_size, letters_of(args)
    sharing = config.num_attention_heads // config.num_query_groups
    # two key/value heads for each tensor-parallel rank and each rank that exchanges heads, or as
    # many as the job has
    members = max(spec.ulysses for _, spec in comm_types.specs(args, settings.current()))
    groups = min(args.num_attention_heads // sharing, 2 * tp * members)
    count = number_of_layers(args, config, kinds)
    values = {name: getattr(config, name) for name in KEPT.split() if hasattr(config, name)} | {
        "num_layers": count,
        "hidden_size": HIDDEN * tp,
        "ffn_hidden_size": 2 * HIDDEN * tp,
        "num_attention_heads": groups * sharing,
        "num_query_groups": groups if sharing > 1 else None,
        "init_method_std": HIDDEN**-0.5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
    }
    for name in BY_LAYER:
        value = getattr(config, name, None)
        values[name] = value[:count] if isinstance(value, list) else value
    if config.num_moe_experts:  # a few on each rank
        balance = config.moe_router_load_balancing_type
        values |= {
            "num_moe_experts": min(config.num_moe_experts, max(4, config.moe_router_topk)),
            "moe_ffn_hidden_size": HIDDEN * tp,
            # Megatron defines it by the tokens of a rank, so another cp size makes another model.
            "moe_router_load_balancing_type": "none" if "sinkhorn" in balance else balance,
        }
    if config.recompute_granularity == "full":
        values["recompute_num_layers"] = min(config.recompute_num_layers, count)
    else:
        modules = {"core_attn", "mla_up_proj"}.intersection(config.recompute_modules or ())
        values["recompute_modules"] = sorted(modules)
    if SPARSE in letters:
        values |= {
            "dsa_indexer_topk": STATE,  # fewer keys than a tiny batch row has
            "dsa_indexer_scoring_relu": False,  # scores would be equal, and Megatron selects any
            "dsa_indexer_rotate_activation": False,  # for bfloat16 only; changes no product
        }
    if letters or config.is_hybrid_model:
        heads = lcm(getattr(args, "mamba_num_groups", None) or 1, tp * args.context_parallel_size)
        values |= {"mamba_num_heads": heads} | dict.fromkeys(SIZES_OF_STATES.split(), STATE)
    return made(**compat.known_arguments(made, values))


def with_changes(owner: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of arguments or a configuration with new values for the names in `changes` that
    it has.
    """
    changed = copy.copy(owner)
    vars(changed).update({name: changes[name] for name in changes.keys() & vars(owner).keys()})
    return changed


def transformer_config(args: argparse.Namespace) -> Any:
    """Return Megatron's configuration of the model: the program's own, else the one made from the
    arguments.
    """
    if hasattr(args, "transformer_config"):
        return args.transformer_config
    # programs on megatron.core alone may lack it
    from megatron.training.argument_utils import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


def number_of_layers(args: argparse.Namespace, config: Any, kinds: list[LayerKind]) -> int:
    """Return how many of the job's first layers show each of `kinds`, and each letter with and
    without experts; and at least as many as one prediction of further tokens has, because its
    layers count from 1 again.

    A program builds a hybrid model of its own pattern, so its tiny model has all layers.
    """
    if hasattr(args, "transformer_config") and config.is_hybrid_model:
        return int(args.num_layers)
    main, *further = letters_of(args).split("/")
    experts = expert_layers(args) if getattr(args, "num_experts", None) else ()
    alike = [*zip_longest(main_layers(main), () if pattern_of(args) else experts)]
    first = [1 + alike.index(each) for each in alike] + [kind.layer for kind in kinds]
    first += [getattr(args, "mtp_num_layers", None) or 1, *map(len, further)]
    return min(args.num_layers, max(first))


def uncovered_layers(args: argparse.Namespace, config: Any) -> list[str]:
    """Return texts about layers of the job that no tiny model can have."""
    by_rank = "which Megatron defines by the tokens of a rank"
    relu = SPARSE in letters_of(args) and getattr(args, "dsa_indexer_scoring_relu", True)
    offloads = "cpu_offloading", "fine_grained_activation_offloading"
    texts = {
        "relu of sparse attention's scores": relu,
        "the kinds of heterogeneous blocks": hasattr(config, "per_block_parameters"),
        f"the capacity of experts ({by_rank})": getattr(args, "moe_expert_capacity_factor", None),
        f"Sinkhorn routing ({by_rank})": "sinkhorn"
        in (getattr(args, "moe_router_load_balancing_type", None) or ""),
        "experts of other ranks": config.expert_model_parallel_size > 1,
        "CUDA graphs": config.cuda_graph_impl != "none",
        "activations in host memory": any(getattr(config, name, False) for name in offloads),
    }
    return [text for text, uncovered in texts.items() if uncovered]


def tiny_pattern(args: argparse.Namespace, layers: int) -> dict[str, str]:
    """Return the pattern of the first `layers` layers, and of those that predict tokens, under the
    argument names that the job uses; {} without a pattern.
    """
    main, *further = pattern_of(args).split("/")
    tiny = "/".join([main_layers(main)[:layers], *further])
    return {name: tiny for name in PATTERNS if getattr(args, name, None)}


def build(args: argparse.Namespace, config: Any, dtype: torch.dtype) -> Any:
    """Build the model of `args` and `config` with all its layers on this rank's device. Attention
    other than the ring's, whose kernels may not know float32, computes in `dtype`.
    """
    from megatron.core import tensor_parallel

    if hasattr(args, "transformer_config"):
        model = args.build(config)
    else:
        from cp_ring.megatron import gpt_model  # imports Megatron

        model = gpt_model.build(config=config)
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    for core in core_attentions(model):
        if not hasattr(core, "plan_of"):
            core.register_forward_pre_hook(
                lambda _, given: (*(x.to(dtype) for x in given[:3]), *given[3:])
            )
            core.register_forward_hook(lambda *call: call[-1].float())
    return model.to(own_device())


def core_attentions(model: Any) -> list[Any]:
    """Return the core attention layers of a model that the certificate examines: all but Megatron's
    sparse attention, which splits tokens itself.
    """
    cores = [getattr(module, "core_attention", None) for module in model.modules()]
    return [core for core in cores if core and not type(core).__name__.startswith("DSA")]


def core_classes(args: argparse.Namespace, config: Any, kinds: list[LayerKind]) -> dict[int, Any]:
    """Return the class of the core attention of the first layer of each of `kinds`, by its number.
    Without --cp-ring it is found in a tiny model.
    """
    if settings.current().enabled:
        from cp_ring.megatron.adapter.attention import RingDotProductAttention  # imports Megatron

        return {kind.layer: RingDotProductAttention for kind in kinds}
    tiny, small = tiny_args(args, config, kinds)
    with (
        megatrons_rejections(),
        group_of_this_rank() as alone,
        arguments_in_force(tiny, one_stage(alone)),
    ):
        model = build(tiny, small, args.params_dtype)
    cores = core_attentions(model)
    names = ", ".join(sorted({type(core).__name__ for core in cores}))
    note(f"certificate of {names}, without --cp-ring")
    # layers that predict further tokens come last, and may count from 1 again
    return {core.layer_number: type(core) for core in reversed(cores)}


@contextmanager
def group_of_this_rank() -> Iterator[Any]:
    """Make a process group of this rank alone for the block, without waiting for other ranks.

    If the job's group is bound to a device, torch would split its NCCL communicator, and NCCL waits
    for all ranks of the job.
    """
    with replaced((dist.distributed_c10d._get_default_group(), "bound_device_id", None)):
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        yield alone
    finally:
        dist.destroy_process_group(alone)


@contextmanager
def arguments_in_force(args: argparse.Namespace, groups: dict[str, Any]) -> Iterator[None]:
    """Replace Megatron's global arguments, timers and process groups within the block, and restore
    them afterwards.
    """
    from megatron.core import Timers, parallel_state

    changes: list[Any] = [(parallel_state, *state) for state in groups.items()]
    if not hasattr(args, "transformer_config"):
        from megatron.training import global_vars  # programs on megatron.core alone may lack it

        changes += [
            (global_vars, "_GLOBAL_ARGS", args),
            (global_vars, "_GLOBAL_TIMERS", Timers(0, "minmax")),
        ]
    with replaced(*changes):
        yield


def one_stage(alone: Any, whole: bool = False) -> dict[str, Any]:
    """Return the parallel state of a rank that holds every stage and expert of its model and, if
    `whole`, whole batch rows and batches (context and data parallel size 1).
    """
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_group()
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = {}
    for name, value in vars(parallel_state).items():
        words = {*name.split("_")}
        if "VIRTUAL" in words:
            state[name] = None
        elif "GLOO" in words or not (
            whole or words & {"EXPERT", "PARTIAL", "PIPELINE", "EMBEDDING"}
        ):
            continue
        elif isinstance(value, dist.ProcessGroup):
            of_data = data if "DATA" in words and not whole else alone
            state[name] = tensor if "TENSOR" in words else of_data
            if {"TENSOR", "DATA"} <= words and "EXPERT" not in words:
                # global_aux_loss counts the tokens of all data-parallel ranks
                state[name] = parallel_state.get_tensor_and_data_parallel_group()
        elif "RANKS" in words and "TENSOR" not in words:
            state[name] = [dist.get_rank()]
    return state
