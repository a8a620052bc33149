"""What Megatron itself says of a job that has not started: whether it accepts the arguments, and
what its weights take.

Megatron's validation is written for a rank with CUDA and TransformerEngine. Here it is asked on any
machine, in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import traceback
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from cp_ring.errors import ConfigError, PlanError, one_line
from cp_ring.megatron.compat import logits_without_te
from cp_ring.megatron.flags.layer_pattern import (
    expert_layers,
    letters_of,
    main_layers,
    pattern_of,
)
from cp_ring.options import Options
from cp_ring.plan.costs.model_sizes import Experts, ModelSizes
from cp_ring.plan.costs.recurrent_costs import RecurrentLayers
from cp_ring.plan.costs.step_costs import ParallelSizes
from cp_ring.plan.sizes.attention_sizes import AttentionSizes

_HOPPER = (9, 0)
_FUSED = {
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
}
"""Functions of TransformerEngine that Megatron's validation looks for."""


def rejection(args: argparse.Namespace, ranks: int) -> str:
    """Why Megatron's own validation rejects these parsed arguments for so many ranks, in one line;
    "" where it accepts them.

    It is asked as on an H100 with TransformerEngine, whether there is one here or not. `args` stay
    as they are.
    """
    from megatron.training import arguments

    asked = copy.deepcopy(args)
    asked.rank, asked.local_rank, asked.world_size = 0, 0, ranks
    # Megatron wants a head for each rank
    if Options.from_args(asked).recurrent_ways["gdn"] != "heads":
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            if heads := getattr(asked, name, None):
                setattr(asked, name, heads * asked.context_parallel_size)
    with (
        _as_on_a_gpu(_connections(asked)),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            with logits_without_te(asked):
                arguments.validate_args(asked)
            arguments.core_transformer_config_from_args(asked)
        # assertions, and whatever else a check of Megatron's raises
        except (Exception, SystemExit) as error:
            return one_line(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return ""


def _connections(args: argparse.Namespace) -> str:
    """CUDA connections of a rank: before Blackwell Megatron demands one, and several with sharded
    parameters.
    """
    sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    return "8" if sharded else "1"


@contextlib.contextmanager
def _as_on_a_gpu(connections: str) -> Iterator[None]:
    """Megatron's validation finds what a rank with an H100 and TransformerEngine has, where it is
    not there already.
    """
    import importlib

    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": connections})
        )
        if not torch.cuda.is_available():
            properties = argparse.Namespace(
                major=_HOPPER[0], minor=_HOPPER[1], multi_processor_count=132, total_memory=80 << 30
            )
            answers: dict[str, Any] = {
                "get_device_capability": _HOPPER,
                "get_device_properties": properties,
                "device_count": 8,
            }
            for name, answer in answers.items():
                stack.enter_context(
                    mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
                )
        for name, functions in _FUSED.items():
            module = importlib.import_module(name)
            for function in functions:
                if getattr(module, function, None) is None:
                    stack.enter_context(mock.patch.object(module, function, object(), create=True))
        yield


def model_sizes(
    args: argparse.Namespace, windows: tuple[tuple[tuple[int, int], int], ...], vocabulary: int
) -> ModelSizes:
    """The model of parsed arguments, which Megatron has not completed yet.

    Raises `ConfigError` for a model of which times are not known.
    """
    if getattr(args, "heterogeneous_layers_config_path", None):
        raise ConfigError(
            "cp-ring tune knows models of equal blocks alone: leave out "
            "--heterogeneous-layers-config-path"
        )
    pattern = main_layers(pattern_of(args))
    try:
        whole = AttentionSizes.from_megatron(args)
        return ModelSizes(
            layers=len(pattern) or args.num_layers,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size or 4 * args.hidden_size,
            heads=whole.heads,
            kv_heads=whole.kv_heads,
            head_dim=whole.head_dim,
            value_dim=whole.value_dim or whole.head_dim,
            vocabulary=vocabulary,
            windows=windows,
            latent=whole.latent,
            query_latent=(getattr(args, "q_lora_rank", None) or 0) if whole.latent else 0,
            gated=bool(args.swiglu),
            tied=not args.untie_embeddings_and_output_weights,
            dtype=whole.dtype,
            experts=_experts(args, pattern),
            loss_chunk=Options.from_args(args).loss_chunk,
            recurrent=RecurrentLayers.of_model(args, main_layers(letters_of(args))),
            networks=pattern.count("-") if pattern else None,
        )
    except PlanError as error:
        raise ConfigError(str(error)) from None


def _experts(args: argparse.Namespace, pattern: str) -> Experts | None:
    if not args.num_experts:
        return None
    return Experts(
        number=args.num_experts,
        layers=pattern.count("E") if pattern else sum(expert_layers(args)),
        top_k=args.moe_router_topk,
        width=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        shared_width=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        parallel=args.expert_model_parallel_size,
    )


def weight_bytes(args: argparse.Namespace, sizes: ParallelSizes, vocabulary: int) -> float:
    """Bytes of weights, gradients and the optimizer's states of the fullest rank, by Megatron's own
    report.

    args: parsed, not completed by Megatron. The report divides the optimizer's states by the data
    parallel size alone; with
    context parallelism Megatron shares them among the context-parallel ranks too, so it is told
    their product.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    asked = copy.copy(args)
    asked.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    asked.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    asked.moe_ffn_hidden_size = args.moe_ffn_hidden_size or asked.ffn_hidden_size
    asked.padded_vocab_size = vocabulary
    asked.tensor_model_parallel_size, asked.pipeline_model_parallel_size = sizes.tp, sizes.pp
    asked.data_parallel_size = sizes.dp * sizes.cp
    asked.world_size = sizes.tp * sizes.cp * sizes.pp * sizes.dp
    asked.expert_tensor_parallel_size = getattr(args, "expert_tensor_parallel_size", None) or 1
    return float(compute_weight_and_optimizer_memory(asked))
