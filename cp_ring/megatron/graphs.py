"""CUDA graphs of Megatron: which of them hold attention, and which settings these support.

A graph repeats what the device did while it was captured, with new values in the same memory. So the plan must be the same in
every step, and nothing in attention may wait for the host, copy from it, or count in Python. Messages over NCCL can be captured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.settings import current
from cp_ring.plan.sizes import WIRES

_SEPARATE = {"moe_router", "moe_preprocess", "mamba"}
"""Modules whose graphs hold them alone."""
_SHARED = {"mlp", "moe"}
"""Modules that --cuda-graph-impl local captures together with the attention of their layer."""
_FULL = "full_iteration"
_CHANGING = ("sft", "dataloader_inter_document_masking", "cp_ring_document_mask", "cp_ring_mask_kinds")
_WATCHING = ("cp_ring_timing", "cp_ring_trace", "cp_ring_debug")
_LOGITS = ("qk_clip", "log_max_attention_logit")


def implementation(args: Any) -> str:
    """What makes CUDA graphs under these flags, or with this configuration: `none`, `local`, `transformer_engine`, ..."""
    if getattr(args, "enable_cuda_graph", False):
        return "local"
    if getattr(args, "external_cuda_graph", False):
        return "transformer_engine"
    return _FULL if _FULL in _modules(args) else getattr(args, "cuda_graph_impl", None) or "none"


def hold_attention(args: Any) -> bool:
    """Whether a CUDA graph holds attention: the graphs of whole layers, of a whole step, and of `attn`.

    Layers of a hybrid model are attention or something else, so a graph of something else is one without attention.
    """
    kind, modules = implementation(args), _modules(args)
    if kind == "none":
        return False
    hybrid = any(getattr(args, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))
    alone = _SEPARATE | (_SHARED if kind == "transformer_engine" or hybrid else set())
    return not modules or not modules <= alone


def given(args: Any) -> str:
    """The flags that ask for graphs, as they were given."""
    old = next((name for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(args, name, False)), "")
    shown = _flag(old) if old else f"--cuda-graph-impl {getattr(args, 'cuda_graph_impl', 'none')}"
    names = " ".join(sorted(_modules(args)))
    flag = "--cuda-graph-modules" if hasattr(args, "cuda_graph_modules") else "--cuda-graph-scope"
    return f"{shown} {flag} {names}" if names else shown


def check(args: argparse.Namespace) -> None:
    """Raises `ConfigError`, whose line names the flag to change, if attention cannot be part of a CUDA graph with these flags."""
    for reason in _reasons(args):
        raise ConfigError(f"{given(args)} puts attention into a CUDA graph: {reason}")


def check_others(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a flag that goes with no graph at all, also with one without attention."""
    kind = implementation(args)
    if kind != "none" and _value(args, "attention_dropout"):
        raise ConfigError(
            f"{given(args)}: --attention-dropout {args.attention_dropout} keeps a count among Megatron's random states, of which "
            "CUDA graphs take generators only: give --attention-dropout 0"
        )
    if kind == "local" and _value(args, "cp_ring_offload"):
        raise ConfigError(f"{given(args)}: --cp-ring-offload adds hooks to layers, which Megatron's graphs reject: leave it out")


def check_reading(args: argparse.Namespace) -> None:
    """Raises `ConfigError` where a graph would hold how `cp_ring.pretrain_gpt` reads a batch, which waits for the host."""
    if implementation(args) == _FULL and args.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"{given(args)}: cp_ring.pretrain_gpt sends batches to the ranks of --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} by way of the host, which no graph can hold: run Megatron-LM's pretrain_gpt.py "
            "by cp_ring.run, or give --cuda-graph-impl local"
        )


def changing(args: argparse.Namespace) -> str:
    """The flag with which each microbatch has documents or a mask of its own; "" for none."""
    return next((_flag(name) for name in _CHANGING if _value(args, name)), "")


def _reasons(args: argparse.Namespace) -> Iterator[str]:
    """What a graph of attention cannot have, with what to do instead."""
    if flag := changing(args):
        yield f"{flag} brings other documents or masks in each step, and a graph repeats one plan: leave it out"
    for name in filter(lambda name: _value(args, name), _WATCHING):
        yield f"{_flag(name)} looks at each hop from the host, which a graph leaves out: leave it out"
    for name in filter(lambda name: _value(args, name), _LOGITS):
        yield f"{_flag(name)} collects values in Python, which a graph leaves out: leave it out"
    if _value(args, "cp_ring_offload"):
        yield "--cp-ring-offload chooses in Python what moves to host memory, which a graph leaves out: leave it out"
    moved = {"core_attn", "attn_proj"} & set(getattr(args, "offload_modules", None) or ())
    if getattr(args, "cpu_offloading_num_layers", 0) or (moved and getattr(args, "fine_grained_activation_offloading", False)):
        flag = f"--offload-modules {' '.join(sorted(moved))}" if moved else "--cpu-offloading-num-layers"
        yield f"{flag} was not tried in a graph: leave it out"
    if getattr(args, "attention_dropout", 0):
        yield f"--attention-dropout {args.attention_dropout} would drop the same weights in each step: give --attention-dropout 0"
    if _value(args, "cp_ring_kernel") in ("cpu", "reference"):
        yield f"--cp-ring-kernel {_value(args, 'cp_ring_kernel')} waits for the host: give a kernel for CUDA, or auto"
    wire = _value(args, "cp_ring_wire")
    if wire in WIRES and WIRES[wire].latent:
        yield f"--cp-ring-wire {wire} finds latents by hooks, which a graph leaves out: give plain, int8 or fp8"
    if getattr(args, "context_parallel_size", 1) > 1 and getattr(args, "distributed_backend", "nccl") != "nccl":
        yield f"--distributed-backend {args.distributed_backend} cannot be captured: give nccl"
    if getattr(args, "cuda_graph_warmup_steps", 1) == 0:
        yield "--cuda-graph-warmup-steps 0 leaves no step before the capture, in which plans are proven: give at least 1"
    keeps = getattr(args, "recompute_granularity", None) == "full" and _value(args, "cp_ring_recompute") == "keep"
    if keeps and getattr(args, "hidden_dropout", 0):
        yield (
            f"--hidden-dropout {args.hidden_dropout} would draw other numbers in a recomputation that keeps attention: give "
            "--cp-ring-recompute replay, or --hidden-dropout 0"
        )


def _modules(args: Any) -> set[str]:
    """The modules in graphs by name, "" for all of a layer; Megatron up to 0.17 calls them the scope."""
    found: set[str] = set()
    for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated"):
        values = getattr(args, name, None) or ()
        values = values.split(",") if isinstance(values, str) else values if isinstance(values, list | tuple) else (values,)
        found |= {str(getattr(value, "name", value)) for value in values}
    return found - {"full"}


def _value(args: argparse.Namespace, name: str) -> Any:
    """A flag's value. A program without flags has the settings of cp_ring in force."""
    if not hasattr(args, name) and name.startswith("cp_ring_"):
        return getattr(current(), name.removeprefix("cp_ring_"))
    value = getattr(args, name, None)
    return int(value or 0) if name == "cp_ring_timing" else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
