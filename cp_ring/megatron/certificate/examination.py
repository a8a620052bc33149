"""Probing a job before it trains, and leaving every state as it was found."""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.megatron import settings
from cp_ring.megatron.certificate import attention, model, record
from cp_ring.megatron.certificate.layer_kinds import Kind, kinds
from cp_ring.megatron.certificate.model import Step
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.rejection import note, reject
from cp_ring.observe import watchdog

SEED = 20261121
CHUNK = 16  # least tokens of a chunk of a probe


def certify(args: argparse.Namespace, step: Step | None = None) -> Certificate:
    """Probes the job of `args`, whose parallel groups exist, on all ranks; ends it with exit code 2 where a probe fails.

    `step` is the forward step that it trains with, by default that of `cp_ring.pretrain_gpt`.

    Leaves random states, arguments, groups and settings as they were. Rank 0 writes the certificate beside the checkpoints.
    """
    certificate = examine(args, step=step)
    failures = certificate.failures
    if failures:
        reject(failures[0].refusal() + (f" (and {len(failures) - 1} more probes failed)" if len(failures) > 1 else ""))
    note(summary(certificate))
    if dist.get_rank() == 0:
        record.save(args, certificate)
    return certificate


def summary(certificate: Certificate) -> str:
    """One line: what was probed, what was not, and how long it took."""
    layers = sorted({f"{probe.layer} under {probe.mask}" for probe in certificate.probes})
    missing = f"; not covered: {', '.join(certificate.about['not_covered'])}" if certificate.about["not_covered"] else ""
    return f"certificate: {len(certificate.probes)} probes passed in {certificate.seconds:.1f} s ({'; '.join(layers)}){missing}"


def examine(args: argparse.Namespace, seed: int = SEED, step: Step | None = None) -> Certificate:
    """All probes of the job of `args`, each the worst of all ranks; every rank calls it and gets the same."""
    start = time.monotonic()
    with _as_before():
        probes, missing = _probe(args, seed, step)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, probes)
    certificate = Certificate(about=record.about(args) | {"not_covered": missing})
    certificate.merge(of_ranks)
    certificate.seconds = time.monotonic() - start
    return certificate


def _probe(args: argparse.Namespace, seed: int, step: Step | None) -> tuple[list[Probe], list[str]]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = _config(args)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
    dtype, device = args.params_dtype, model.own_device()
    probes: list[Probe] = []
    found = kinds(args, config, masks(args), CHUNK)
    for kind in found:
        layer = _layer(config, kind, groups)
        probes += attention.probe(attention.Subject(kind, layer, groups.cp, dtype, device), _split, seed)
    reason = model.uncovered(args)
    if reason:
        return probes, [f"the loss of {reason}"]
    more, missing = _probe_model(args, config, seed, step)
    return probes + more, missing


def _probe_model(args: argparse.Namespace, config: Any, seed: int, step: Step | None) -> tuple[list[Probe], list[str]]:
    main = [mask for mask in masks(args) if mask != "packed"]
    missing = ["experts, in the loss"] if getattr(args, "num_experts", None) else []
    missing += ["the loss of packed sequences"] if "packed" in masks(args) and "causal" in main else []
    if args.tensor_model_parallel_size > 1 and not model.is_own(step):
        # Its ranks may wait for one another: where the step fails on one of them alone, the others would never return.
        return [], [*missing, "the loss of a script's own forward step with tensor-parallel ranks"]
    small = kinds(args, config, tuple(main), CHUNK, whole=True)
    same = _of_one_length(small)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    before = settings.current()
    try:
        settings.configure(before.model_copy(update={"kernel": _kernel(before.kernel, small[0])}))
        return model.probe(args, same, alone, step, seed), missing
    except (ConfigError, PlanError, KernelError):
        raise
    except Exception as error:  # flags that a tiny model cannot have must not stop a job that is right
        return [], [*missing, f"the loss ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"]
    finally:
        settings.configure(before)
        dist.destroy_process_group(alone)


def _of_one_length(found: list[Kind]) -> list[Kind]:
    """The kinds as layers of one model: all with the longest rows among them."""
    tokens = max(kind.tokens for kind in found)
    return [replace(kind, tokens=tokens) for kind in found]


def _kernel(name: str, kind: Kind) -> str:
    """The job's kernel if it can compute in float32 here, else the reference."""
    from cp_ring.kernels import choose

    device = model.own_device()
    try:
        choose(name, device=device, dtype=torch.float32, d=kind.d, e=kind.e, packed=False)
    except (ConfigError, KernelError):
        return "reference"
    return name


def masks(args: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of mask that the job's microbatches bring."""
    if settings.current().document_mask:
        return ("documents", "packed")
    packed = getattr(args, "dataloader_inter_document_masking", False) or getattr(args, "sft", False)
    return ("causal", "packed") if packed else ("causal",)


def _config(args: argparse.Namespace) -> Any:
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


def _layer(config: Any, kind: Kind, groups: Any) -> Any:
    """The job's core attention of this kind of layer, as its attention layer builds it."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.core_attention import RingDotProductAttention

    sizes: dict[str, Any] = {}
    if getattr(config, "multi_latent_attention", False):
        sizes = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    elif getattr(config, "softmax_scale", None):
        sizes = {"softmax_scale": config.softmax_scale}
    layer = RingDotProductAttention(config, kind.layer, AttnMaskType.causal, "self", pg_collection=groups, **sizes)
    if kind.probed != kind.window:
        layer.window = kind.probed
    return layer


def _split(batch: dict[str, torch.Tensor], rank: int, cp: int) -> dict[str, torch.Tensor]:
    from cp_ring.megatron import gpt

    return gpt.on_this_cp_rank(batch, rank, cp)


@contextmanager
def _as_before() -> Iterator[None]:
    """Restores every random state, cp_ring's settings, what Megatron collects while a model runs, and the watchdog's rest."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import multi_token_prediction

    restore: list[Callable[[], Any]] = []
    for get, put in ((random.getstate, random.setstate), (np.random.get_state, np.random.set_state)):
        restore.append(_later(put, get()))
    restore.append(_later(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available():
        restore.append(_later(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    restore.append(_later(tracker.set_states, dict(tracker.get_states())))
    restore.append(_later(settings.configure, settings.current()))
    for name in ("MTPLossLoggingHelper", "MTPLossAutoScaler"):
        owner = getattr(multi_token_prediction, name, None)
        for field in ("tracker", "main_loss_backward_scale"):
            if owner is not None and hasattr(owner, field):
                value = getattr(owner, field)
                restore.append(_later(lambda pair: setattr(*pair), (owner, field, dict(value) if field == "tracker" else value)))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()
        watchdog.rest()  # what follows may take its time, such as rank 0 indexing a data set while the others wait in a barrier
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _later(put: Callable[[Any], Any], value: Any) -> Callable[[], Any]:
    return lambda: put(value)
