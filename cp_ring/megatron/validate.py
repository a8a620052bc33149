"""Checks of Megatron's parsed flags, before any process group exists: each raises `ConfigError` with a line naming the flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.megatron import saved
from cp_ring.megatron.refuse import note, refusing
from cp_ring.megatron.settings import configure

# What Megatron must be told where there is no CUDA: attribute, value, the flag by which a user might have said otherwise.
_CPU_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("distributed_backend", "gloo", "--distributed-backend"),
    ("transformer_impl", "local", "--transformer-impl"),
    ("use_cpu_initialization", True, ""),
    ("gradient_accumulation_fusion", False, ""),
    ("masked_softmax_fusion", False, ""),
    ("bias_gelu_fusion", False, ""),
    ("bias_swiglu_fusion", False, ""),
    ("bias_dropout_fusion", False, ""),
    ("apply_rope_fusion", False, ""),
    ("no_persist_layer_norm", True, ""),
)


def accept(args: argparse.Namespace) -> argparse.Namespace:
    """Checks `args` as Megatron parsed them, completes them, and puts their cp_ring settings in force.

    Ends the process with one line and exit code 2 if they cannot run.
    """
    with refusing():
        config = ContextParallelConfig.from_args(args)
        if config.cpu:
            run_on_cpu(args, sys.argv[1:])
        if config.enabled:
            args.create_attention_mask_in_dataloader = False  # s x s booleans that ring attention does not need
            check_attention(args)
        check_sizes(args)
        check_data(args)
        saved.choose(args)
        configure(config)
    return args


def accept_complete(args: argparse.Namespace) -> argparse.Namespace:
    """As `accept`, for what can be checked only once Megatron has validated and completed `args`."""
    with refusing():
        saved.check_model(args)
    return args


def run_on_cpu(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Sets what Megatron needs where there is no CUDA, unless the command line `argv` says otherwise, which is refused."""
    import torch

    if torch.cuda.is_available():
        note("CUDA is present: --cp-ring-cpu changes nothing")
        return
    for name, value, flag in _CPU_SETTINGS:
        given = flag and any(word == flag or word.startswith(flag + "=") for word in argv)
        if given and getattr(args, name) != value:
            raise ConfigError(f"{flag} {getattr(args, name)} needs CUDA, and --cp-ring-cpu runs without: give {value} or nothing")
        setattr(args, name, value)
    if args.sequence_parallel:
        raise ConfigError("--sequence-parallel needs TransformerEngine's or Apex's norms: leave it out with --cp-ring-cpu")
    note("no CUDA: training on the CPU over gloo, with Megatron's local layers and without fused kernels")


def check_sizes(args: argparse.Namespace) -> None:
    """The sequence splits into 2 * cp chunks, and tp * pp * cp divides the number of ranks."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    for dimension, size in (("tensor-model", tp), ("pipeline-model", pp), ("context", cp)):
        if size < 1:
            raise ConfigError(f"--{dimension}-parallel-size {size} must be at least 1")
    if args.seq_length and cp > 1 and args.seq_length % (2 * cp):
        raise ConfigError(
            f"--seq-length {args.seq_length} is not divisible by 2 x --context-parallel-size {cp} = {2 * cp}: change either"
        )
    if args.world_size % (tp * pp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} "
            f"= {tp * pp * cp} does not divide the {args.world_size} ranks of this job"
        )


def check_attention(args: argparse.Namespace) -> None:
    """Nothing is asked of attention that ring attention does not do."""
    if args.attention_dropout:
        raise ConfigError(f"--cp-ring does not serve --attention-dropout {args.attention_dropout}: give --attention-dropout 0")
    types = getattr(args, "cp_comm_type", None) or ["p2p"]
    other = [kind for kind in types if kind != "p2p"]
    if other:
        raise ConfigError(f"--cp-ring serves --cp-comm-type p2p, not {other[0]}")
    refused = (
        ("window_size", None, "--window-size", "sliding windows"),
        ("softmax_type", "vanilla", "--softmax-type", "softmax offsets"),
        ("reset_attention_mask", False, "--reset-attention-mask", "document masks"),
        ("dataloader_inter_document_masking", False, "--dataloader-inter-document-masking", "document masks"),
        ("sft", False, "--sft", "packed sequences"),
        ("hybrid_context_parallel", False, "--hybrid-context-parallel", "a context-parallel size per sequence"),
        ("hierarchical_context_parallel_sizes", None, "--hierarchical-context-parallel-sizes", "nested context-parallel groups"),
        ("experimental_attention_variant", None, "--experimental-attention-variant", "other attention variants"),
        ("qk_clip", False, "--qk-clip", "the largest attention logit"),
        ("log_max_attention_logit", False, "--log-max-attention-logit", "the largest attention logit"),
        ("fp8_dot_product_attention", False, "--fp8-dot-product-attention", "attention in fp8"),
        ("cuda_graph_impl", "none", "--cuda-graph-impl", "CUDA graphs"),
    )
    for name, served, flag, what in refused:
        value = getattr(args, name, served)
        if value != served:
            shown = flag if value is True else f"{flag} {value}"
            raise ConfigError(f"--cp-ring does not serve {what}: leave out {shown}")


def check_data(args: argparse.Namespace) -> None:
    """Every data set named by --data-path and its like exists and holds tokens."""
    flags = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    for name in flags:
        for prefix in _prefixes(getattr(args, name, None) or []):
            _check_prefix(prefix, "--" + name.replace("_", "-"))


def _prefixes(words: Sequence[str]) -> list[str]:
    """The data set prefixes of a blend: either prefixes alone, or weights and prefixes in turn."""
    weighted = len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2])
    return list(words[1::2] if weighted else words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_prefix(prefix: str, flag: str) -> None:
    if "://" in prefix:
        return  # an object store: Megatron fetches it
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        if not path.is_file():
            raise ConfigError(f"{flag} {prefix}: {path} does not exist")
        if not path.stat().st_size:
            raise ConfigError(f"{flag} {prefix}: {path} is empty")
