"""Checks Megatron's parsed flags before any process group exists, and puts in force what follows
from them.

The ranks call `accept` and `accept_complete`. `job.command_line` calls the same checks before it
starts any rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cp_ring.errors import Reasons
from cp_ring.megatron.attention_sizes import attention_sizes
from cp_ring.megatron.flags import attention_rules, comm_types, rules
from cp_ring.megatron.flags.codec_choice import choose_wire
from cp_ring.megatron.flags.layer_pattern import attention_layers, pattern_of
from cp_ring.megatron.flags.rule import Job, Rule, check_rules
from cp_ring.megatron.options import Options
from cp_ring.megatron.rejection import note, rejecting
from cp_ring.megatron.settings import LayerWindows, configure
from cp_ring.runtime import RUNTIME

_CHECKPOINTS = ("latest_checkpointed_iteration.txt", "non_persistent", ".metadata")
"""What a folder holds one of if --load finds a checkpoint in it."""

_CPU_SETTINGS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_reduce_div_fusion": False,  # a reduction that NCCL alone has
    "no_persist_layer_norm": True,
}
"""What Megatron needs without CUDA."""


def accept(args: argparse.Namespace) -> argparse.Namespace:
    """Checks `args` after Megatron has parsed them, sets dependent arguments, and applies the
    settings of cp_ring.

    Ends the process with one line and exit code 2 if `args` are rejected.
    """
    with rejecting():
        config = Options.from_args(args)
        job = Job(args, config, sys.argv[1:])
        if config.cpu:
            run_on_cpu(job)
        if config.enabled:
            # s x s booleans that ring attention does not need
            args.create_attention_mask_in_dataloader = False
        check_job(job, rules.TRAINING + rules.DATA + rules.LAYERS)
        config = _as_settled(args, config)
        configure(config, layers=windows_of(args) if config.enabled else None)
    return args


def check_job(job: Job, also: Iterable[Rule] = ()) -> None:
    """Checks parsed flags, as the ranks and `cp-ring train` do, with all reasons at once, and sets
    arguments that depend on others. also: further rules.
    """
    reasons = Reasons()
    with reasons.of():
        check_rules(job, also)
    with reasons.of():
        check_rules(job, rules.RING + rules.SIZES + (() if job.sizes_from_a_file else rules.MODEL))
    with reasons.of():
        if job.own.enabled:
            check_attention(job)
    reasons.end()


def check_attention(job: Job) -> None:
    """Checks what ring attention must support, of flags or of a program, and sets the arguments
    that documents need.
    """
    check_rules(job, attention_rules.ATTENTION + attention_rules.DOCUMENTS)
    job.own.check_schedule(job.cp)
    comm_types.check(job)
    if job.overlap_moe_expert_parallel_comm:
        note(
            "warning: no GPU has run --overlap-moe-expert-parallel-comm with ring attention yet: "
            "compare the losses of the first steps with those without it"
        )
    backend = getattr(job.attention_backend, "name", "auto")
    if backend != "auto":
        note(
            f"--attention-backend {backend} has no effect on ring attention: --cp-ring-kernel "
            "chooses its kernel"
        )
    if job.apply_rope_fusion and (reason := _why_unfused(job)):
        job.args.apply_rope_fusion = False
        note(
            f"{reason}, which the fused rotary embedding does not support: it is switched off "
            "(--no-rope-fusion)"
        )
    if job.masks_documents:
        # Megatron's data set then starts position ids at 0 after each end-of-document token, and
        # masks that token's loss.
        job.args.reset_position_ids = job.args.reset_attention_mask = job.args.eod_mask_loss = True


def windows_of(args: argparse.Namespace) -> LayerWindows | None:
    """The windows of the attention layers of the flags; None where these do not say how many layers
    there are.
    """
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
    narrow = sum(
        bool(every[layer - 1] if isinstance(every, list) else layer % every) for layer in layers
    )
    windows = (((int(window[0]), int(window[1])), narrow), ((-1, -1), len(layers) - narrow))
    return tuple((its, count) for its, count in windows if count)


def accept_complete(args: argparse.Namespace) -> argparse.Namespace:
    """As `accept`, for checks that need `args` after Megatron has validated and completed them."""
    with rejecting():
        _note_new_start(args)
        config = Options.from_args(args)
        if config.enabled:
            check_rules(Job(args, config), rules.INSTALLED)
            config = settle(args, config)
            note_gather(args, config)
            note_recompute(args, config)
            note_loss(args, config)
    return args


_settled: dict[tuple[str, ...], str] = RUNTIME.keep({})
"""The codec that was chosen, by the command line."""


def _as_settled(args: argparse.Namespace, config: Options) -> Options:
    """The settings with the choice that was made for this command line before: Megatron parses it
    more than once.
    """
    args.cp_ring_wire = _settled.get(tuple(sys.argv), config.wire)
    return replace(config, wire=args.cp_ring_wire)


def settle(args: argparse.Namespace, config: Options) -> Options:
    """Puts in force what travels, where the flags leave it to cp_ring. Says what was chosen."""
    if config.wire == "auto":
        _settled[tuple(sys.argv)] = choose_wire(args, config)
    else:
        choose_wire(args, config)
    chosen = _as_settled(args, config)
    configure(chosen)
    return chosen


def run_on_cpu(job: Job) -> None:
    """Sets the arguments that Megatron needs without CUDA. Raises `ConfigError` if the command line
    contradicts one.
    """
    import torch  # not at the top: the early checks of most jobs need no torch

    if torch.cuda.is_available():
        note("CUDA is present: --cp-ring-cpu changes nothing")
        return
    check_rules(job, rules.WITHOUT_CUDA)
    vars(job.args).update(_CPU_SETTINGS)
    note(
        "no CUDA: training on the CPU over gloo, with Megatron's local layers and without fused "
        "kernels"
    )


def _note_new_start(args: argparse.Namespace) -> None:
    """Says that a job which was told to load finds nothing to load."""
    folder = getattr(args, "load", None)
    other = getattr(args, "pretrained_checkpoint", None)
    if not folder or other or "://" in str(folder):
        return
    if not any(Path(folder, name).exists() for name in _CHECKPOINTS):
        what = (
            "--exit-on-missing-checkpoint ends the job"
            if getattr(args, "exit_on_missing_checkpoint", False)
            else "training starts anew"
        )
        note(f"--load {folder}: there is no checkpoint: {what}")


def note_recompute(args: argparse.Namespace, config: Options) -> None:
    """Prints the memory of --cp-ring-recompute keep, or that recomputing only attention saves
    nothing. `args` are complete.
    """
    if Job(args, config).recomputes_attention:
        note(
            "--recompute-granularity selective of core_attn frees no memory with ring attention, "
            "which keeps only q, k, v, out and lse: leave it out"
        )
    if args.recompute_granularity == "full" and config.recompute == "keep":
        sizes = attention_sizes(args, args.tensor_model_parallel_size)
        of_token = sizes.out_width * sizes.element + sizes.batch * sizes.heads * 4
        kept = args.seq_length // args.context_parallel_size * of_token
        note(
            f"recomputation keeps out and lse of attention, {kept / 2**20:.3g} MiB per layer and "
            "microbatch in flight, and the ring runs once; --cp-ring-recompute replay keeps "
            "nothing and runs it twice"
        )


def note_loss(args: argparse.Namespace, config: Options) -> None:
    """Prints over which tokens a mean loss is taken, where ranks may differ in their number.
    `args` are complete.
    """
    if args.context_parallel_size == 1 or args.calculate_per_token_loss:
        return
    if config.stock_loss_average:
        note(
            "--cp-ring-stock-loss-average: the loss is the average of the mean losses of "
            "context-parallel ranks, however many of their tokens count"
        )
    else:
        note(
            "patch loss_average: the loss is the mean over the tokens of all context-parallel "
            "ranks; --cp-ring-stock-loss-average leaves Megatron's average of their means"
        )


def note_gather(args: argparse.Namespace, config: Options) -> None:
    """Prints the memory of the keys that arrive in one receive buffer with --cp-comm-type
    all_gather. `args` are complete.
    """
    cp = args.context_parallel_size
    if cp == 1 or "all_gather" not in comm_types.types_by_layer(args):
        return
    sizes = attention_sizes(args, args.tensor_model_parallel_size)
    held = args.seq_length // cp * (cp - 1) * sizes.key_width * sizes.element
    note(
        f"--cp-comm-type all_gather: a receive buffer holds the keys and values of {cp - 1} other "
        f"ranks, {held / 2**20:.3g} MiB; p2p needs less on many ranks"
    )


def _why_unfused(job: Job) -> str:
    """Why the fused rotary embedding cannot have the positions of the tokens, "" where it can."""
    if job.position_embedding_type in ("learned_absolute", "none"):
        return ""
    if job.own.kinds or (job.own.named_layout.weighs and job.own.document_mask):
        asked = "--cp-ring-mask-kinds" if job.own.kinds else job["--cp-ring-layout"]
        other = job.holds("--multi-latent-attention") or job.holds("--micro-batch-size>1")
        return (
            f"{asked} with {other} has different positions in each microbatch and batch row"
            if other
            else ""
        )
    if job.mrope_section and job.sft:
        return "mrope_section with packed documents gives each token positions of its own"
    together = job.holds("--dataloader-inter-document-masking") or (
        job.own.named_layout.weighs and job.sft and f"--sft with {job['--cp-ring-layout']}"
    )
    return (
        f"{together} splits documents all together"
        if together and not job.own.document_mask and job.cp > 1
        else ""
    )
