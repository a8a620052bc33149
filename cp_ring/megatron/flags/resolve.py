"""Rejects jobs that cannot run, and puts the settings of the others in force, before any process
group exists.

The ranks call `accept` after Megatron has parsed its flags, and `accept_complete` after it has
validated them: what Megatron rejects itself has no check here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cp_ring.errors import ConfigError, Reasons
from cp_ring.megatron.adapter.asked import (
    Asked,
    Check,
    recomputes_attention,
    reject_where,
    window_of_layer,
)
from cp_ring.megatron.adapter.compat import arguments
from cp_ring.megatron.adapter.config import LayerWindows
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.flags import comm_types
from cp_ring.megatron.flags.checks_attention import ATTENTION
from cp_ring.megatron.flags.checks_documents import DOCUMENTS, masks_documents
from cp_ring.megatron.flags.checks_job import HERE, JOB
from cp_ring.megatron.flags.layer_pattern import attention_layers, letters_of, pattern_of
from cp_ring.megatron.options import Options
from cp_ring.megatron.rejection import rejecting
from cp_ring.megatron.settings import configure

_CPU_SETTINGS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "cuda_graph_impl": "none",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_reduce_div_fusion": False,  # only NCCL has this reduction
    "no_persist_layer_norm": True,
}
"""Arguments that Megatron needs without CUDA."""
_OF_CUDA = (
    "gpu_sniff_test_interval", "log_straggler", "nccl_ub", "record_memory_history",
    "enable_cuda_graph", "external_cuda_graph",
)  # fmt: skip
"""Arguments that Megatron cannot follow without CUDA."""


def accept(args: argparse.Namespace) -> argparse.Namespace:
    """Set arguments of `args` that follow from others, check all of them, and put cp_ring's
    settings in force.

    Ends the process with one line and exit code 2 if `args` are rejected.
    """
    with rejecting():
        options = Options.from_args(args)
        if options.cpu:
            run_on_cpu(args, sys.argv[1:])
        if options.enabled:
            # ring attention does not need these s x s booleans
            args.create_attention_mask_in_dataloader = False
        check(args, options, (*JOB, *HERE))
        job = arguments()
        # Megatron parses its flags again, after the choices
        if options.wire == "auto" and job:
            options = replace(options, wire=Options.from_args(job).wire)
        if args.use_checkpoint_args and job:
            options = replace(options, recurrent=Options.from_args(job).recurrent)
        options = with_way(args, _with_named_type(args, options, sys.argv[1:]))
        args.cp_ring_recurrent = options.recurrent
        configure(options, windows=windows_of(args) if options.enabled else None)
    return args


def reject_file(argv: Sequence[str]) -> None:
    """Raise `ConfigError` for a command line with flags of cp_ring that Megatron will drop."""
    names = {word.partition("=")[0] for word in argv}
    if "--yaml-cfg" in names and any(name.startswith("--cp-ring") for name in names):
        raise ConfigError(
            "--yaml-cfg replaces all flags, those of cp_ring too: give its values as flags"
        )


def accept_complete(args: argparse.Namespace) -> argparse.Namespace:
    """Put cp_ring's settings in force again, now that Megatron has validated and completed `args`,
    with the codec of keys on the wire, which is chosen here unless a flag names one.
    """
    options = Options.from_args(args)
    if options.enabled:
        with rejecting():
            wire = "plain"
            if options.wire != "auto" or Asked(args).multi_latent_attention:
                from cp_ring.megatron.flags.codec_choice import choose_wire  # others have one codec

                wire = choose_wire(args, options)
            if options.wire == "auto":
                args.cp_ring_wire = wire
                options = replace(options, wire=wire)
            configure(options)
            prefer_messages(args)
            note_loss(args, options)
            if recomputes_attention(Asked(args)):
                note(
                    "--recompute-granularity selective of core_attn frees no memory with ring "
                    "attention, which keeps only q, k, v, out and lse: leave it out"
                )
    return args


def with_way(args: argparse.Namespace, options: Options) -> Options:
    """Return the settings with heads or states, for recurrent layers, in place of `auto`."""
    if options.recurrent != "auto" or not (letters_of(args) or Asked(args).is_hybrid_model):
        return options
    from cp_ring.megatron.flags.recurrent_choice import choose  # few jobs have such layers

    return replace(options, recurrent=choose(Asked(args)))


def prefer_messages(args: argparse.Namespace) -> None:
    """Let NCCL's kernels of the context-parallel group go before attention that is ready at the
    same moment; else they may wait until its last blocks run.
    """
    if args.distributed_backend == "nccl":
        named = args.high_priority_stream_groups or []
        args.high_priority_stream_groups = [*dict.fromkeys([*named, "cp"])]


def _with_named_type(args: argparse.Namespace, options: Options, argv: Sequence[str]) -> Options:
    """Return the settings of a job that gives `--cp-comm-type` and no number of heads: p2p then
    means the ring alone.
    """
    names = {word.partition("=")[0] for word in argv}
    if "--cp-comm-type" in names and "--cp-ring-heads" not in names and options.heads == "auto":
        args.cp_ring_heads = 1
        return replace(options, heads=1)
    return options


def check(args: Any, options: Options, checks: Iterable[Check] = JOB) -> None:
    """Check parsed flags. Raises `ConfigError` with all reasons at once."""
    reasons = Reasons()
    with reasons.of():
        reject_where(checks, args, options)
    with reasons.of():
        if options.enabled:
            check_attention(args, options)
    reasons.end()


def check_attention(args: Any, options: Options) -> None:
    """Check attention for a job or a program, and set the arguments that documents need."""
    reject_where(ATTENTION + DOCUMENTS, args, options)
    asked = Asked(args)
    for _, spec in comm_types.specs(args, options):
        if asked.cp > 1 and options.wire not in ("auto", "plain"):
            from cp_ring.megatron.adapter.latent_tap import check_latent  # few jobs have latents

            check_latent(args, spec.ulysses, options)
    backend = getattr(asked.attention_backend, "name", "auto")
    if backend != "auto":
        note(
            f"--attention-backend {backend} has no effect on ring attention: --cp-ring-kernel "
            "chooses its kernel"
        )
    if asked.apply_rope_fusion and _own_positions(asked, options):
        args.apply_rope_fusion = False
        note(
            "the tokens have positions of their own microbatch, batch row or document, which the "
            "fused rotary embedding does not support: it is switched off (--no-rope-fusion)"
        )
    if masks_documents(asked, options):
        # Megatron's data set then restarts position ids at 0 after each end-of-document token, and
        # masks the loss of that token.
        args.reset_position_ids = args.reset_attention_mask = args.eod_mask_loss = True


def windows_of(args: argparse.Namespace) -> LayerWindows | None:
    """Return the windows of the attention layers; None if the flags do not give the number of
    layers.
    """
    if not pattern_of(args) and not args.num_layers:
        return None
    layers = attention_layers(args)
    if not layers:
        return None
    counts = Counter(window_of_layer(Asked(args), layer) for layer in layers)
    return tuple(sorted(counts.items(), reverse=True))


def run_on_cpu(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Set the arguments that Megatron needs without CUDA. Raises `ConfigError` if the command line
    contradicts one.
    """
    import torch  # imported here because most early checks need no torch

    if torch.cuda.is_available():
        note("CUDA is present: --cp-ring-cpu changes nothing")
        return
    for name in ("distributed_backend", "transformer_impl", "cuda_graph_impl"):
        flag = "--" + name.replace("_", "-")
        value = _CPU_SETTINGS[name]
        given = {word.partition("=")[0] for word in argv}
        if flag in given and getattr(args, name) != value:
            raise ConfigError(
                f"{flag} {getattr(args, name)} needs CUDA, and --cp-ring-cpu runs without it: give "
                f"{value}"
            )
    asked = Asked(args)
    flag = asked.first(*_OF_CUDA)
    if asked.profile and not asked.use_pytorch_profiler:
        flag = "--profile without --use-pytorch-profiler"
    if flag:
        raise ConfigError(f"{flag} needs CUDA, and --cp-ring-cpu runs without it: leave it out")
    vars(args).update(_CPU_SETTINGS)
    note(
        "no CUDA: training on the CPU over gloo, with Megatron's local layers and without fused "
        "kernels"
    )


def note_loss(args: argparse.Namespace, options: Options) -> None:
    """Print which tokens the mean loss covers, if ranks may have different numbers of them and no
    flag says it. `args` must be complete.
    """
    known = args.calculate_per_token_loss or options.stock_loss_average
    if args.context_parallel_size > 1 and not known:
        note(
            "patch loss_average: the loss is the mean over the tokens of all context-parallel "
            "ranks; --cp-ring-stock-loss-average leaves Megatron's average of their means"
        )


def _own_positions(args: Asked, options: Options) -> bool:
    """Return True if tokens may have positions that the fused rotary embedding does not take. They
    differ between microbatches or batch rows, have sections (mrope), or belong to documents that
    are split all together.
    """
    if args.position_embedding_type in ("learned_absolute", "none"):
        return False
    weighs = options.named_layout.weighs
    if options.kinds or (weighs and options.document_mask):
        return bool(args.multi_latent_attention or (args.micro_batch_size or 1) > 1)
    if args.mrope_section and args.sft:
        return True
    together = args.dataloader_inter_document_masking or (weighs and args.sft)
    return bool(together and not options.document_mask and args.cp > 1)
