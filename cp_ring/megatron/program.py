"""Supports programs that build their models themselves, on megatron.core without its command line.

Such programs have a `TransformerConfig` in place of Megatron's arguments. Checks and probes read
Megatron's argument names, so they get a namespace with the fields of that configuration.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron import settings
from cp_ring.megatron.adapter.config import LayerWindows
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.flags import resolve
from cp_ring.megatron.options import Options
from cp_ring.megatron.wrapping import ForwardStep, replaced
from cp_ring.runtime import RUNTIME

DRAWN = "drawn"


@dataclass
class Program:
    """The values that `cp_ring.megatron.enable` was given, and the state of certification.

    Attributes:
        seq_length: tokens of a batch row, 0 if unknown.
        micro_batch_size: batch rows of a microbatch.
        packed: True if microbatches hold packed documents (thd).
        recurrent: heads or states of recurrent layers, or `auto`, which each model settles anew.
        windows: those of the first model, by which rows of all models are split: a batch does not
            say which model it is for.
        certified: the kinds of attention that were probed; see `_kind_of`.
        probing: True while the probes build models of their own.
        build: makes a model of a `TransformerConfig`; set by `certify`.
        microbatch: the first one of training, that `certify` was given, or `drawn`.
    """

    seq_length: int = 0
    micro_batch_size: int = 1
    packed: bool = False
    recurrent: str = "auto"
    windows: LayerWindows | None = None
    certified: set[tuple[str, ...]] = field(default_factory=set)
    probing: bool = False
    build: Callable[[Any], Any] | None = None
    microbatch: Any = DRAWN


_began: Any = RUNTIME.cell(None)
"""Holds the program that `enable` started, if there is one."""


def begin(program: Program | None) -> None:
    """Make `program` the program of this process; None forgets it."""
    _began.value = program


def arguments_of(config: Any) -> argparse.Namespace:
    """Return the fields of a `TransformerConfig` under the names of Megatron's arguments, with the
    values that `enable` was given.
    """
    program = _began.value or Program()
    absent = dict.fromkeys(
        ("window_size", "window_attn_skip_freq", "mtp_num_layers", "load", "save")
    )
    named = {
        "transformer_config": config,
        "build": program.build,
        "seq_length": program.seq_length,
        "micro_batch_size": program.micro_batch_size,
        "sft": program.packed,
        "num_experts": config.num_moe_experts,
        "position_embedding_type": "rope",
        "reset_attention_mask": False,
        "skip_train": program.microbatch == DRAWN,
        "train_iters": 1,
        "world_size": torch.distributed.get_world_size()
        if torch.distributed.is_initialized()
        else 1,
    }
    return argparse.Namespace(**absent | vars(config) | named)


def check_settings(options: Options, seq_length: int, cp: int = 1) -> None:
    """Raise `ConfigError` for settings that need Megatron's own training loop, and for batch rows
    that `cp` ranks cannot share.
    """
    if options.certify == "only":
        raise ConfigError(
            "--cp-ring-certify only (certify=) needs a job of flags: leave it out, and call "
            "cp_ring.megatron.certify"
        )
    if options.beneath:
        raise ConfigError(
            "--cp-ring-beneath (beneath=) needs a job of flags: leave it out, and call "
            "cp_ring.integrations.transformer_engine.use_ring in place of enable"
        )
    if options.balance_microbatches:
        raise ConfigError(
            "--cp-ring-balance-microbatches (balance_microbatches=) needs a job of flags: leave it "
            "out, or train with cp_ring.run or cp_ring.pretrain_gpt"
        )
    if cp > 1 and seq_length % (2 * cp):
        raise ConfigError(
            f"enable(seq_length={seq_length}): it is not divisible by 2 x {cp} context-parallel "
            f"ranks = {2 * cp}"
        )


def accept_model(config: Any) -> argparse.Namespace:
    """Check the configuration of a model before it is built, and put the settings that depend on it
    in force.

    Raises `ConfigError` for features that ring attention does not support. Errors name the flag
    `--x-y` for the field `x_y` of the configuration.
    """
    args = arguments_of(config)
    program = _began.value or Program()
    used = settings.current()
    if not program.probing:
        used = replace(used, recurrent=program.recurrent)
    check_settings(used, args.seq_length, args.context_parallel_size)
    resolve.check_attention(args, used)
    used = resolve.with_way(args, used)
    config.apply_rope_fusion = args.apply_rope_fusion
    resolve.note_loss(args, used)
    program.windows = program.windows or resolve.windows_of(args)
    settings.configure(used, windows=program.windows)
    return args


_KIND = (
    "context_parallel_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "multi_latent_attention",
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "experimental_attention_variant",
    "is_hybrid_model",
)


def _kind_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return a key; models with the same key share a certificate."""
    return tuple(str(getattr(args, name, None)) for name in _KIND)


def certify_model(args: argparse.Namespace, name: str, own_group: bool) -> None:
    """Make the certificate before the first model is built, if `certify` has not done so. All ranks
    call it together.

    `name` is the name of the model; `own_group` says whether its context-parallel group differs
    from Megatron's. A printed line says that such a model, or a later one of another kind, is not
    covered.
    """
    program = _began.value
    if program is None or program.probing or settings.current().certify == "off":
        return
    from megatron.core import parallel_state  # slow to import, and installed with Megatron only

    if not parallel_state.model_parallel_is_initialized():
        program.certified.add(_kind_of(args))
        note(
            "warning: no certificate: Megatron's parallel_state is not initialized; give "
            "--no-cp-ring-certify (certify='off')"
        )
    elif own_group or (program.certified and _kind_of(args) not in program.certified):
        why = "context-parallel group is its own" if own_group else "attention differs from before"
        way_out = "" if own_group else ": call cp_ring.megatron.certify for it too"
        gap = f"not covered: {name}, whose {why}{way_out}"
        if settings.current().certify == "strict":
            raise ConfigError(f"--cp-ring-certify strict: {gap}")
        note(f"certificate: {gap}")
    elif not program.certified:
        _examine(args, None)


def certify(
    config: Any,
    build: Callable[[Any], Any],
    forward_step: ForwardStep,
    microbatch: Any = DRAWN,
    **program: Any,
) -> Any:
    """Probe attention, and the loss and gradients of a tiny model that the program itself builds.
    All ranks call it together.

        cp_ring.megatron.certify(config, build_model, forward_step)

    Call it after Megatron has made its parallel groups. After `cp_ring.megatron.enable` it examines
    ring attention; without this call the certificate is then made when the first model is built,
    and does not cover the loss. Without `enable` it examines the attention that the model has, such
    as TransformerEngine's own, or the ring beneath it.

    Args:
        config: the `TransformerConfig` of the model.
        build: makes a whole model from such a configuration. It is called with small copies of
            `config`, also with context parallel size 1.
        forward_step: `forward_step(data_iterator, model)`, as Megatron's schedules take it, which
            returns the losses of tokens and a loss function. It splits the batch itself, for
            example with `split_batch`. An item of the iterator is a dictionary of tokens, labels,
            position_ids and loss_mask, each [b, n] of whole batch rows. After
            `packed=True` an item is one batch row of packed documents, with offsets
            `cu_seqlens`, int32 [1, documents + 1], and `max_seqlen`, int32 [1], as in the data
            sets of Megatron's scripts; each document has a multiple of 2 * cp tokens.
        microbatch: the item that this rank trains on first, None where a rank loads no data. It is
            examined and not changed. Without it the probes draw one.
        program: without `enable`, its `seq_length`, `micro_batch_size` and `packed`.

    Returns:
        The certificate (`cp_ring.megatron.certificate.Certificate`), or None with `certify="off"`.

    Raises:
        ConfigError: on all ranks, if a probe fails.
    """
    if _began.value is None:
        with (
            replaced((_began, "value", Program(**program, build=build, microbatch=microbatch))),
            settings.in_force(Options.make()),
        ):
            return _examine(arguments_of(config), forward_step)
    if program:
        raise ConfigError("cp_ring.megatron.certify: give sizes to enable, which was called")
    if settings.current().certify == "off":
        return None
    _began.value.build, _began.value.microbatch = build, microbatch
    return _examine(accept_model(config), forward_step)


def _examine(args: argparse.Namespace, step: ForwardStep | None) -> Any:
    from cp_ring.megatron.certificate import certify as probes  # imports Megatron
    from cp_ring.megatron.certificate.tiny_model import own_device

    program = _began.value
    program.certified.add(_kind_of(args))
    # A program may build its model on the meta device, or without gradients.
    with (
        replaced((program, "probing", True)),
        torch.device(own_device()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        certificate = probes.run_probes(args, step=step)
        if not args.skip_train:
            first = probes.run_probes(args, step=step, items=[program.microbatch])
            certificate.probes += first.probes
            certificate.not_covered += first.not_covered
    if problem := probes.verdict(certificate):
        raise ConfigError(problem)
    return certificate
