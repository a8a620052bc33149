"""Checks of Megatron's parsed flags before any process group exists. Each raises `ConfigError` with a line that names the flag.

The ranks call `accept` and `accept_complete`. `job.command_line` calls the same checks before it starts any rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cp_ring.config import ContextParallelConfig
from cp_ring.errors import ConfigError
from cp_ring.megatron import comm_types, compat, features, implementations, shape_choice
from cp_ring.megatron.checkpoints import inspection
from cp_ring.megatron.layer_pattern import RECURRENT, attention_layers, pattern_of, shown_pattern
from cp_ring.megatron.rejection import note, rejecting
from cp_ring.megatron.settings import LayerWindows, configure
from cp_ring.megatron.wire import choose_wire
from cp_ring.runtime import RUNTIME

# Settings that Megatron needs without CUDA: attribute, value, and the flag that can contradict it ("" if there is none).
_CPU_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("distributed_backend", "gloo", "--distributed-backend"),
    ("transformer_impl", "local", "--transformer-impl"),
    ("use_cpu_initialization", True, ""),
    ("gradient_accumulation_fusion", False, ""),
    ("gradient_reduce_div_fusion", False, ""),  # a reduction that NCCL alone has
    ("masked_softmax_fusion", False, ""),
    ("bias_gelu_fusion", False, ""),
    ("bias_swiglu_fusion", False, ""),
    ("bias_dropout_fusion", False, ""),
    ("apply_rope_fusion", False, ""),
    ("no_persist_layer_norm", True, ""),
)

_PACKED = ("sft", "dataloader_inter_document_masking")


def accept(args: argparse.Namespace) -> argparse.Namespace:
    """Checks `args` after Megatron has parsed them, sets dependent arguments, and applies the settings of cp_ring.

    Ends the process with one line and exit code 2 if `args` are rejected.
    """
    with rejecting():
        config = ContextParallelConfig.from_args(args)
        if config.cpu:
            run_on_cpu(args, sys.argv[1:])
        if config.enabled:
            args.create_attention_mask_in_dataloader = False  # s x s booleans that ring attention does not need
            features.check_attention(args)
            check_documents(args, config)
        elif config.document_mask or config.kinds:
            raise ConfigError(f"{config.flag('document_mask' if config.document_mask else 'mask_kinds')} needs --cp-ring")
        check_loss_chunk(args, config)
        check_microbatches(args, config)
        check_trace(args, config)
        check_sizes(args)
        if config.enabled:
            config.check_schedule(args.context_parallel_size)
            comm_types.check(args, config)
        check_norms(args)
        check_data(args)
        check_layers(args)
        inspection.choose(args)
        config = _as_settled(args, config)
        configure(config, layers=windows_of(args) if config.enabled else None)
    return args


def windows_of(args: argparse.Namespace) -> LayerWindows | None:
    """The windows of the attention layers of the flags; None where these do not say how many layers there are."""
    if not pattern_of(args) and not args.num_layers:
        return None
    layers = attention_layers(args)
    if not layers:
        return None
    window, every = getattr(args, "window_size", None), getattr(args, "window_attn_skip_freq", None)
    if window is None:
        return (((-1, -1), len(layers)),)
    if every is None:
        return (((int(window[0]), int(window[1])), len(layers)),)
    narrow = sum(bool(every[layer - 1] if isinstance(every, list) else layer % every) for layer in layers)
    found = (((int(window[0]), int(window[1])), narrow), ((-1, -1), len(layers) - narrow))
    return tuple((its, count) for its, count in found if count)


def accept_complete(args: argparse.Namespace) -> argparse.Namespace:
    """As `accept`, for checks that need `args` after Megatron has validated and completed them."""
    with rejecting():
        inspection.check_model(args)
        config = ContextParallelConfig.from_args(args)
        if config.enabled:
            note(implementations.line(args))
            config = settle(args, config)
            note_gather(args, config)
            note_recompute(args, config)
    return args


_settled: dict[tuple[str, ...], dict[str, str | int]] = RUNTIME.keep({})
"""The route, the number of heads and the codec that were chosen, by the command line."""


def _as_settled(args: argparse.Namespace, config: ContextParallelConfig) -> ContextParallelConfig:
    """The settings with the choice that was made for this command line before: Megatron parses it more than once."""
    found = _settled.get(tuple(sys.argv), {})
    for name, value in found.items():
        setattr(args, f"cp_ring_{name}", value)
    return config.model_copy(update=found)


def settle(args: argparse.Namespace, config: ContextParallelConfig) -> ContextParallelConfig:
    """Puts in force what the flags leave to cp_ring: the shape and the codec. Says what was chosen, and why."""
    shape = settle_shape(args, config)
    wire = choose_wire(args, shape)
    choices_made = {"route": shape.route, "heads": shape.heads, "wire": wire}
    _settled[tuple(sys.argv)] = {name: value for name, value in choices_made.items() if getattr(config, name) == "auto"}
    chosen = _as_settled(args, shape)
    configure(chosen)
    return chosen


def settle_shape(args: argparse.Namespace, config: ContextParallelConfig) -> ContextParallelConfig:
    """The settings with the fastest route and number of heads where the flags ask for `auto`."""
    if "auto" not in (config.route, config.heads):
        return config
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    group = [place * tp for place in range(cp)]  # each context-parallel group has this pattern
    sizes = shape_choice.attention_sizes(vars(args), tp)
    windows = windows_of(args) or (((-1, -1), 1),)
    settled, reason = shape_choice.settle(config, vars(args), cp, sizes, group, windows=windows)
    note(reason)
    return settled


def run_on_cpu(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Sets the arguments that Megatron needs without CUDA. Raises `ConfigError` if the command line `argv` contradicts one."""
    import torch  # not at the top: the early checks of most jobs need no torch

    if torch.cuda.is_available():
        note("CUDA is present: --cp-ring-cpu changes nothing")
        return
    for name, value, flag in _CPU_SETTINGS:
        given = flag and any(word == flag or word.startswith(flag + "=") for word in argv)
        if given and getattr(args, name) != value:
            raise ConfigError(f"{flag} {getattr(args, name)} needs CUDA, and --cp-ring-cpu runs without it: give {value}")
        setattr(args, name, value)
    if args.sequence_parallel and not args.spec:
        raise ConfigError("--sequence-parallel needs TransformerEngine's or Apex's norms: leave it out with --cp-ring-cpu")
    note("no CUDA: training on the CPU over gloo, with Megatron's local layers and without fused kernels")


def check_model(args: argparse.Namespace) -> None:
    """Checks that the sizes of the model are given, unless Megatron reads them from a checkpoint or from its own YAML file."""
    if _sizes_from_a_file(args):
        return
    others = {"num_layers": ("encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"),
              "seq_length": ("encoder_seq_length",)}  # fmt: skip
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
    missing = [name for name in names if all(getattr(args, key, None) is None for key in (name, *others.get(name, ())))]
    if missing:
        raise ConfigError(f"section megatron lacks {', '.join(missing)} of the model")


def check_sizes(args: argparse.Namespace) -> None:
    """Checks that ranks, sequence, heads and batches are divisible by the parallel sizes, and that intervals are positive."""
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
    if not _sizes_from_a_file(args):
        _check_heads(args, tp)
        _check_batch(args, data_parallel=args.world_size // (tp * pp * cp))
    unused = ("eval_interval",) if getattr(args, "full_validation", False) else ()
    for name in ("save_interval", "log_interval", "eval_interval"):
        interval = getattr(args, name, None)
        if name not in unused and interval is not None and interval < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {interval} must be at least 1")


def _sizes_from_a_file(args: argparse.Namespace) -> bool:
    """Whether the flags may lack the sizes of the model, because Megatron reads them from a checkpoint or its own YAML file."""
    return bool(getattr(args, "use_checkpoint_args", False) or getattr(args, "yaml_cfg", None))


def _check_heads(args: argparse.Namespace, tp: int) -> None:
    """Checks that key/value heads divide query heads, and that tensor-parallel ranks divide both."""
    heads = args.num_attention_heads
    if heads is None:
        return
    if heads < 1:
        raise ConfigError(f"--num-attention-heads {heads} must be at least 1")
    if heads % tp:
        raise ConfigError(f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}: change either")
    if args.kv_channels is None and args.hidden_size and args.hidden_size % heads:
        raise ConfigError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: change either, or give "
            "--kv-channels"
        )
    if not args.group_query_attention:  # Megatron then ignores --num-query-groups
        return
    groups = args.num_query_groups
    if groups < 1:
        raise ConfigError(f"--num-query-groups {groups} must be at least 1")
    if heads % groups:
        raise ConfigError(f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: change either")
    if groups % tp and tp % groups:
        raise ConfigError(
            f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}: change either"
        )


def _check_batch(args: argparse.Namespace, data_parallel: int) -> None:
    """Checks that each global batch is a whole number of microbatches per data-parallel rank, also with --rampup-batch-size."""
    micro, whole = args.micro_batch_size, args.global_batch_size
    for flag, size in (("--micro-batch-size", micro), ("--global-batch-size", whole)):
        if size is not None and size < 1:
            raise ConfigError(f"{flag} {size} must be at least 1")
    if micro is None or whole is None or getattr(args, "decrease_batch_size_if_needed", False):
        return
    first = getattr(args, "rampup_batch_size", None)
    flag, sizes = ("--rampup-batch-size", first[:2]) if first else ("--global-batch-size", [whole])
    for size in map(int, sizes):
        if size % (micro * data_parallel):
            raise ConfigError(
                f"{flag} {size} is not divisible by --micro-batch-size {micro} x {data_parallel} data-parallel ranks "
                f"= {micro * data_parallel}: change either"
            )


def note_recompute(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Prints the memory of --cp-ring-recompute keep, or that recomputing only attention saves nothing. `args` are complete."""
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    if args.recompute_granularity == "selective" and "core_attn" in modules:
        note(
            "--recompute-granularity selective of core_attn frees no memory with ring attention, which keeps only q, k, v, out "
            "and lse: leave it out"
        )
    if args.recompute_granularity == "full" and config.recompute == "keep":
        tokens = args.seq_length // args.context_parallel_size * args.micro_batch_size
        heads = args.num_attention_heads // args.tensor_model_parallel_size
        size = args.v_head_dim if getattr(args, "multi_latent_attention", False) else args.kv_channels
        kept = tokens * heads * (size * args.params_dtype.itemsize + 4)
        note(
            f"recomputation keeps out and lse of attention, {kept / 2**20:.3g} MiB per layer and microbatch in flight, and the "
            "ring runs once; --cp-ring-recompute replay keeps nothing and runs it twice"
        )


def note_gather(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Prints the memory of the keys that arrive in one receive buffer with --cp-comm-type all_gather. `args` are complete."""
    cp = args.context_parallel_size
    if cp == 1 or "all_gather" not in comm_types.types_by_layer(args):
        return
    latent = getattr(args, "multi_latent_attention", False)
    groups = args.num_attention_heads if latent or not args.group_query_attention else args.num_query_groups
    width = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim if latent else 2 * args.kv_channels
    tokens = args.seq_length // cp * (cp - 1) * args.micro_batch_size
    held = tokens * max(groups // args.tensor_model_parallel_size, 1) * width * args.params_dtype.itemsize
    note(
        f"--cp-comm-type all_gather: a receive buffer holds the keys and values of {cp - 1} other ranks, {held / 2**20:.3g} MiB; "
        "p2p needs less on many ranks"
    )


def check_documents(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Checks that the flags about documents agree, and sets the flags of Megatron that documents need."""
    _unfuse_rotary(args, config)
    _check_hybrid(args, config)
    if config.kinds and config.document_mask:
        raise ConfigError(
            "--cp-ring-mask-kinds and --cp-ring-document-mask both say which tokens see which: give only the former, and "
            "Mask.documents in the batches"
        )
    if config.kinds and getattr(args, "dataloader_inter_document_masking", False):
        raise ConfigError(
            "--cp-ring-mask-kinds and --dataloader-inter-document-masking both say which tokens see which: give only one"
        )
    inter_document = getattr(args, "dataloader_inter_document_masking", False)
    if inter_document and getattr(args, "sft", False):
        raise ConfigError("--sft and --dataloader-inter-document-masking name two kinds of data sets: give only one")
    if config.document_mask and getattr(args, "sft", False) and getattr(args, "mock_data", False):
        raise ConfigError("--sft needs conversations: give --data-path FILE.jsonl instead of --mock-data")
    if config.document_mask and not inter_document and not getattr(args, "sft", False):
        # Megatron's data set then starts position ids at 0 after each end-of-document token, and masks that token's loss.
        args.reset_position_ids = args.reset_attention_mask = args.eod_mask_loss = True
    elif args.reset_attention_mask:
        raise ConfigError("--reset-attention-mask makes masks of s x s tokens: give --cp-ring-document-mask instead")


def check_trace(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Raises `ConfigError` for steps to trace that the job does not reach, or that have no ring attention."""
    last, steps = config.traced[-1:], getattr(args, "train_iters", None)
    if last and not config.enabled:
        raise ConfigError(f"--cp-ring-trace {config.trace}: it needs --cp-ring")
    if last and steps is not None and last[0] > steps:
        raise ConfigError(f"--cp-ring-trace {config.trace}: step {last[0]} is past the last one, --train-iters {steps}")


def check_loss_chunk(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Checks that --cp-ring-loss-chunk is for a loss that can be computed in parts."""
    flag = config.flag("loss_chunk")
    if config.loss_chunk and not config.enabled:
        raise ConfigError(f"{flag} needs --cp-ring")
    whole = ("mtp_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern", "defer_embedding_wgrad_compute")
    for name in whole if config.loss_chunk else ():
        if getattr(args, name, None):
            other = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not support {other}, which needs all logits at once: leave out either")


def check_microbatches(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Checks that --cp-ring-balance-microbatches is for batch rows of unequal work, whose steps are known in advance."""
    if not config.balance_microbatches:
        return
    flag = config.flag("balance_microbatches")
    if not config.enabled:
        raise ConfigError(f"{flag} needs --cp-ring")
    packed = any(getattr(args, name, False) for name in _PACKED)
    if not (packed or config.document_mask or config.kinds):
        raise ConfigError(
            f"{flag} needs batch rows of unequal work: --sft, --dataloader-inter-document-masking, --cp-ring-document-mask or "
            "--cp-ring-mask-kinds"
        )
    if not args.calculate_per_token_loss:
        raise ConfigError(
            f"{flag} needs --calculate-per-token-loss: a mean of the means of microbatches depends on which batch rows share one"
        )
    if args.dataloader_type not in (None, "single", "cyclic"):
        raise ConfigError(f"{flag} does not support --dataloader-type {args.dataloader_type}: give single or cyclic")
    for name in ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"):
        if getattr(args, name, None):
            raise ConfigError(f"{flag} needs steps of one size: leave out --{name.replace('_', '-')}")


def _unfuse_rotary(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Switches off the fused rotary embedding, with a note, where it cannot have the positions of the tokens."""
    if args.apply_rope_fusion and (reason := _why_unfused(args, config)):
        args.apply_rope_fusion = False
        note(f"{reason}, which the fused rotary embedding does not support: it is switched off (--no-rope-fusion)")


def _why_unfused(args: argparse.Namespace, config: ContextParallelConfig) -> str:
    if args.position_embedding_type in ("learned_absolute", "none"):
        return ""
    if config.kinds or (config.layout == "balanced" and config.document_mask):
        asked = "--cp-ring-mask-kinds" if config.kinds else "--cp-ring-layout balanced"
        latent = getattr(args, "multi_latent_attention", False)
        other = "--multi-latent-attention" if latent else f"--micro-batch-size {args.micro_batch_size}"
        several = latent or args.micro_batch_size > 1
        return f"{asked} with {other} has different positions in each microbatch and batch row" if several else ""
    inter_document = getattr(args, "dataloader_inter_document_masking", False)
    together = inter_document or (getattr(args, "sft", False) and config.layout == "balanced")
    if together and not config.document_mask and args.context_parallel_size > 1:
        flag = "--dataloader-inter-document-masking" if inter_document else "--sft with --cp-ring-layout balanced"
        return f"{flag} splits documents all together"
    return ""


def _check_hybrid(args: argparse.Namespace, config: ContextParallelConfig) -> None:
    """Checks that layers whose state runs along the sequence can have the documents of a microbatch."""
    pattern, shown = pattern_of(args), shown_pattern(args)
    recurrent = [kind for letter, kind in RECURRENT.items() if letter in pattern]
    if not recurrent:
        return
    others = [kind for kind in config.kinds if kind not in ("documents", "causal")]
    if others:
        raise ConfigError(
            f"--cp-ring-mask-kinds {others[0]} does not reach the {recurrent[0]} layers of {shown}, whose state runs along the "
            "sequence: they support documents and causal"
        )
    if "G" in pattern and args.context_parallel_size > 1:
        compat.check_gated_delta_net(shown)
    with_documents = config.document_mask or config.kinds or any(getattr(args, name, False) for name in _PACKED)
    if not with_documents:
        return
    if "M" in pattern and not getattr(args, "use_mamba_mem_eff_path", True):
        raise ConfigError(
            f"--disable-mamba-mem-eff-path: the Mamba layers of {shown} then have no documents (Megatron supports them on the "
            "other path alone): leave it out"
        )
    if "G" in pattern and getattr(args, "deterministic_mode", False):
        raise ConfigError(
            f"--deterministic-mode: the gated delta net layers of {shown} then have no documents (fla's kernels have them, which "
            "are not deterministic): leave it out"
        )


def check_layers(args: argparse.Namespace) -> None:
    """Checks that TransformerEngine is installed, if the layers come from it."""
    if args.transformer_impl == "transformer_engine" and not args.spec and not implementations.has_transformer_engine():
        raise ConfigError(
            "transformer_impl: transformer_engine (--transformer-impl; Megatron's default) needs TransformerEngine, which is not "
            'installed here: pip install -e ".[te]", or give transformer_impl: local (--transformer-impl local)'
        )


def check_norms(args: argparse.Namespace) -> None:
    """Checks that --sequence-parallel is given if experts need it, and only if the norms of the layers support it."""
    tp = args.tensor_model_parallel_size
    if tp == 1:
        return
    if getattr(args, "num_experts", None) and not args.sequence_parallel:
        raise ConfigError(
            f"--num-experts with --tensor-model-parallel-size {tp} needs --sequence-parallel (Megatron requires it)"
        )
    local = args.transformer_impl == "local" and not args.spec
    if args.sequence_parallel and local and not implementations.has_apex_norm(args.normalization):
        raise ConfigError(
            f"--sequence-parallel with --transformer-impl local and --normalization {args.normalization} has norms that need the "
            "whole sequence: give --transformer-impl transformer_engine, or leave out --sequence-parallel"
        )


def check_data(args: argparse.Namespace) -> None:
    """Checks that every data set that --data-path and similar flags name exists and is not empty."""
    flags = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    check = _check_conversations if getattr(args, "sft", False) else _check_prefix
    for name in flags:
        for prefix in _prefixes(getattr(args, name, None) or []):
            check(prefix, "--" + name.replace("_", "-"))


def _prefixes(words: Sequence[str]) -> list[str]:
    """The data set prefixes of a blend. A blend is a list of prefixes, or of weight, prefix, weight, prefix, ..."""
    weighted = len(words) > 1 and len(words) % 2 == 0 and all(_is_number(word) for word in words[::2])
    return list(words[1::2] if weighted else words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_conversations(path: str, flag: str) -> None:
    if "://" in path or Path(path).is_dir():
        return  # what Megatron's own data set may read
    if not Path(path).is_file():
        raise ConfigError(f"{flag} {path}: does not exist")
    if not Path(path).stat().st_size:
        raise ConfigError(f"{flag} {path}: is empty")


def _check_prefix(prefix: str, flag: str) -> None:
    if "://" in prefix:
        return  # an object store: Megatron fetches it
    for suffix in (".idx", ".bin"):
        path = Path(prefix + suffix)
        if not path.is_file():
            raise ConfigError(f"{flag} {prefix}: {path} does not exist")
        if not path.stat().st_size:
            raise ConfigError(f"{flag} {prefix}: {path} is empty")
