"""Probes a job before it trains, and ends it where a probe fails."""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.megatron import rejection, settings
from cp_ring.megatron.certificate import (
    attention_probe,
    layer_probe,
    loss_probe,
    record,
    tiny_model,
)
from cp_ring.megatron.certificate.isolation import (
    Failure,
    ProbeGroups,
    made_by_members,
    probe_groups,
    states_restored,
)
from cp_ring.megatron.certificate.layer_kinds import GRAIN, LayerKind, find_layer_kinds, masks_of
from cp_ring.megatron.certificate.recurrent_twin import uncovered_states
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.subject import Subject
from cp_ring.megatron.certificate.tiny_layers import uncovered_layers
from cp_ring.megatron.certificate.training_step import ForwardStep
from cp_ring.megatron.certificate.value_probe import value_probes
from cp_ring.megatron.flags.layer_pattern import config_of_layer

SEED = 20261121
LENGTH_SECONDS = 5.0  # for all probes at the job's own sequence length together
LOADED_SECONDS = 1.0  # for those after a checkpoint is loaded


def certify(
    args: argparse.Namespace, step: ForwardStep | None = None, loaded: bool = False
) -> Certificate:
    """Probes the job of `args`, whose parallel groups exist, on all ranks; ends it with exit code 2
    where a probe fails.

    `step` is the forward step that it trains with, by default that of `cp_ring.pretrain_gpt`. With
    `--cp-ring-certify strict` the job ends too where something cannot be probed. `loaded`: it has
    been certified before, and has loaded a checkpoint since.

    Leaves random states, arguments, groups and settings as they were. Rank 0 writes the certificate
    beside the checkpoints.
    """
    try:
        certificate = run_probes(
            args, step=step, seconds=LOADED_SECONDS if loaded else LENGTH_SECONDS
        )
    except ConfigError as error:
        rejection.reject(str(error))
    if loaded:
        certificate.about["loaded"] = True
    if problem := verdict(certificate):
        rejection.reject(problem)
    if dist.get_rank() == 0 and not loaded:
        record.save(args, certificate)
    return certificate


def verdict(certificate: Certificate) -> str:
    """Why the job must not train, in one line, or "": then rank 0 prints what was probed."""
    failures = certificate.failures
    if failures:
        more = f" (and {len(failures) - 1} more probes failed)" if len(failures) > 1 else ""
        return failures[0].rejection() + more
    if settings.current().certify == "strict" and certificate.not_covered:
        return (
            f"--cp-ring-certify strict: not covered: {', '.join(certificate.not_covered)}; "
            "--cp-ring-certify on trains without it"
        )
    rejection.note(summary(certificate))
    return ""


def summary(certificate: Certificate) -> str:
    """One line: what was probed, what was not, and how long it took."""
    limits = certificate.about.get("up_to", {})
    probes, seconds = certificate.probes, certificate.seconds
    layers = sorted({f"{probe.layer} under {probe.mask}" for probe in probes})
    layers = [layer + (f", up to {limits[layer]}" if layer in limits else "") for layer in layers]
    gaps = certificate.not_covered
    missing = f"not covered: {', '.join(gaps)}" if gaps else ""
    after = " after loading the checkpoint" * ("loaded" in certificate.about)
    passed = f"{len(probes)} probes passed in {seconds:.1f} s ({'; '.join(layers)})"
    of_loss = "loss" in {probe.name for probe in probes}
    parts = [passed, missing] if of_loss else [missing, passed]
    return f"certificate{after}: {'; '.join(filter(None, parts))}"


@dataclass
class _Findings:
    """What the probes of one rank found.

    `up_to` tells, by layer and mask, how far the probes went (tokens, batch rows) where the job
    goes further; `failure` why they ended early.
    """

    attention: list[Probe] = field(default_factory=list)
    loss: list[Probe] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    up_to: dict[str, tuple[int, int]] = field(default_factory=dict)
    failure: Failure | None = None


def run_probes(
    args: argparse.Namespace,
    seed: int = SEED,
    step: ForwardStep | None = None,
    seconds: float = LENGTH_SECONDS,
) -> Certificate:
    """All probes of the job of `args`, each the worst of all ranks; every rank calls it and gets
    the same certificate.

    `seconds` limits the time of the probes at the job's own sequence length.

    Raises `ConfigError` on all ranks where attention cannot be probed on one of them.
    """
    start = time.monotonic()
    of_ranks: list[_Findings] = [_Findings()] * dist.get_world_size()
    with states_restored(), probe_groups() as groups:
        mine = _probe_on_this_rank(groups, args, seed, step, seconds)
        dist.all_gather_object(of_ranks, mine)
    failed = (found.failure for found in of_ranks if found.failure)
    failure = min(failed, key=lambda each: each.order, default=None)
    if failure and failure.fatal:
        raise ConfigError(f"--cp-ring-certify: {failure}")
    certificate = Certificate(about=record.about(args))
    everywhere = set.intersection(*({probe.mask for probe in found.loss} for found in of_ranks))
    certificate.merge(
        [found.attention + [p for p in found.loss if p.mask in everywhere] for found in of_ranks]
    )
    certificate.not_covered = list(mine.not_covered)
    certificate.about["up_to"] = least_reach([found.up_to for found in of_ranks], args)
    if failure:
        certificate.failure = str(failure)
        what = "the loss of packed sequences" if "causal" in everywhere else "the loss"
        certificate.not_covered.append(f"{what} ({failure})")
    certificate.seconds = time.monotonic() - start
    return certificate


def _probe_on_this_rank(
    groups: ProbeGroups,
    args: argparse.Namespace,
    seed: int,
    step: ForwardStep | None,
    seconds: float,
) -> _Findings:
    """Runs all probes; an exception becomes the failure of this rank. Other ranks learn of it and
    stop too.

    A job whose flags no tiny model can have may be right, so only attention that cannot be probed
    is fatal.
    """
    found = _Findings()
    of_attention = True
    with groups.in_force():
        try:
            _probe_attention(args, found, seed, seconds)
            of_attention = False
            _probe_loss(args, found, seed, step)
        except Exception as error:
            fatal = of_attention or isinstance(error, ConfigError | PlanError | KernelError)
            found.failure = groups.fail(error, fatal)
    groups.done.set()
    if found.failure:
        groups.close()
    return found


def _probe_attention(args: argparse.Namespace, found: _Findings, seed: int, seconds: float) -> None:
    """Probes every kind of layer of the job, over the context-parallel group in force."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = tiny_model.transformer_config(args)
    if isinstance(config.window_size, int):
        found.not_covered.append("windows that core attention classes set by layer")
        config = copy.copy(config)
        config.window_size = None
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
    kinds = find_layer_kinds(args, config, masks_of(args))
    for kind in kinds:
        layers = {
            number: _make_layer(config, replace(kind, layer=number), groups)
            for number in kind.numbers
        }
        layer = layers[kind.layer]
        subject = Subject(
            kind,
            layer,
            groups.cp,
            args.params_dtype,
            tiny_model.own_device(),
            loss_probe.split_of(args),
            seed,
        )
        found.attention.append(layer_probe.probe_built(subject, layers))
        others = {number: each for number, each in reversed(layers.items()) if number != kind.layer}
        found.attention += layer_probe.probe_others(subject, others)
        layer.window = kind.probed
        found.attention += attention_probe.probe_short(subject)
        found.attention += attention_probe.probe_dropout(subject) if layer.dropout else []
        layer.window = kind.window
        tokens = attention_probe.longest_in_time(subject, args.seq_length, seconds / len(kinds))
        long = attention_probe.at_length(subject, tokens)
        if tokens > kind.tokens or kind.probed != kind.window:
            found.attention += attention_probe.probe_long(long)
        found.attention.append(layer_probe.probe_plans(long, others))
        found.up_to |= _limits(args, kind, tokens)
        if args.params_dtype in (torch.float16, torch.bfloat16):
            layer.window = kind.probed
            found.attention += _probe_sums(subject)


def _probe_sums(subject: Subject) -> list[Probe]:
    """The probes of values again in float32, which show sums that are kept in too few bits."""
    layer = subject.layer.float()
    layer.options = replace(
        layer.options, kernel=_kernel_in_float32(layer.options.kernel, subject.kind)
    )
    return value_probes(replace(subject, dtype=torch.float32, note=" in float32"))


def _limits(args: argparse.Namespace, kind: LayerKind, tokens: int) -> dict[str, tuple[int, int]]:
    """How far the probes of a kind went, (tokens, batch rows) by layer and mask, where the job goes
    further.
    """
    short = tokens + 2 * args.context_parallel_size * GRAIN <= args.seq_length
    short |= kind.mask == "causal" and tokens < args.seq_length
    few = kind.batch_size < args.micro_batch_size and kind.mask != "packed"
    reach = tokens if short else args.seq_length, kind.batch_size if few else args.micro_batch_size
    return {f"{kind.layer_name} under {kind.mask}": reach} if short or few else {}


def least_reach(
    of_ranks: list[dict[str, tuple[int, int]]], args: argparse.Namespace
) -> dict[str, str]:
    """How far the probes went on all ranks, in words, as in `4096 of 131072 tokens`.
    Context-parallel groups may differ in it.
    """
    words = {}
    for name in dict.fromkeys(name for up_to in of_ranks for name in up_to):
        reached = [up_to[name] for up_to in of_ranks if name in up_to]
        least = (min(one) for one in zip(*reached, strict=True))
        wanted = (args.seq_length, "tokens"), (args.micro_batch_size, "batch rows")
        words[name] = " and ".join(
            f"{n} of {whole} {unit}"
            for n, (whole, unit) in zip(least, wanted, strict=True)
            if n < whole
        )
    return words


def _probe_loss(
    args: argparse.Namespace, found: _Findings, seed: int, step: ForwardStep | None
) -> None:
    """Probes the loss and the gradients of a tiny model, with the forward step of the job."""
    reason = tiny_model.uncovered(args)
    if reason:
        found.not_covered.append(f"the loss of {reason}")
        return
    found.not_covered += [f"{layers}, in the loss" for layers in uncovered_layers(args)]
    config = tiny_model.transformer_config(args)
    with made_by_members():
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    before = settings.current()
    try:
        for mask in _masks_of_loss(args, step):
            reason = uncovered_states(args, mask)
            if reason:
                found.not_covered.append(reason)
                continue
            kinds = find_layer_kinds(args, config, (mask,), whole_rows=True)
            tokens = max(kind.tokens for kind in kinds)
            kinds = [replace(kind, tokens=tokens) for kind in kinds]
            settings.configure(replace(before, kernel=_kernel_in_float32(before.kernel, kinds[0])))
            probes, missing = loss_probe.probe_loss(args, kinds, alone, step, seed)
            found.loss += probes
            rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
            if (
                rotates
                and tokens < args.seq_length
                and not any(probe.name == "rotary embedding" for probe in probes)
            ):
                found.up_to[f"{probes[0].layer} under {mask}"] = tokens, args.micro_batch_size
            found.not_covered += [one for one in missing if one not in found.not_covered]
    finally:
        settings.configure(before)
        dist.destroy_process_group(alone)


def _masks_of_loss(args: argparse.Namespace, step: ForwardStep | None) -> list[str]:
    """The masks under which the forward step of the job is probed.

    A script's step takes whole batch rows and packed ones as its flags say, and that of a program
    one of the two. The step of `cp_ring.pretrain_gpt` has documents in place of packed ones.
    """
    masks = masks_of(args)
    if hasattr(args, "transformer_config") and "causal" in masks:
        return ["packed" if args.sft else "causal"]
    packed = not hasattr(args, "transformer_config") and not loss_probe.is_own(step)
    return [mask for mask in masks if mask != "packed" or packed]


def _kernel_in_float32(name: str, kind: LayerKind) -> str:
    """The job's kernel if it can compute in float32 here, else the reference."""
    from cp_ring.kernels import choose  # finds out which kernels are installed

    try:
        choose(
            name,
            device=tiny_model.own_device(),
            dtype=torch.float32,
            d=kind.d,
            e=kind.e,
            packed=kind.mask != "causal",
        )
    except (ConfigError, KernelError):
        return "reference"
    return name


def _make_layer(config: Any, kind: LayerKind, groups: Any) -> Any:
    """The job's core attention of this kind of layer, as its attention layer builds it."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_ring.megatron.ring_core_attention import RingDotProductAttention  # imports Megatron

    sizes: dict[str, Any] = {}
    if config.multi_latent_attention:
        sizes = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    elif config.softmax_scale:
        sizes = {"softmax_scale": config.softmax_scale}
    config = config_of_layer(config, kind.layer)
    layer = RingDotProductAttention(config, kind.layer, AttnMaskType.causal, "self",
                                    cp_comm_type=kind.comm_type,
                                    pg_collection=groups, **sizes)  # fmt: skip
    return layer.eval()  # without dropout, which has a probe of its own
