"""Probes a tiny model made from the job's flags: losses and gradients of two microbatches, against
context parallel size 1, and how a microbatch of the job's own length reaches it.

The model runs forward and backward of one training step as the job does: the job's split of the
batch, its forward step and loss, its recomputation, Megatron's schedule, DistributedDataParallel
and reduction of gradients. The reference run has the same weights, holds whole batch rows, and
attends by a dense mask in float64. Both compute in float32. So they differ only in context
parallelism and recomputation, and in the labels that the loss mask hides, which must not count.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.first_microbatch import Item, mask_of, whole_item
from cp_ring.megatron.certificate.layer_kinds import (
    LayerKind,
    find_layer_kinds,
    masks_of,
)
from cp_ring.megatron.certificate.reference_run import (
    follow_rules,
    uncovered_states,
    whole_rows_in_force,
)
from cp_ring.megatron.certificate.report import Certificate
from cp_ring.megatron.certificate.tiny_layers import uncovered_layers
from cp_ring.megatron.certificate.tiny_model import (
    arguments_in_force,
    arguments_of_microbatch,
    build,
    group_of_this_rank,
    one_stage,
    own_device,
    tiny_args,
    transformer_config,
    with_changes,
)
from cp_ring.megatron.certificate.training_step import ForwardStep, compare, train
from cp_ring.megatron.wrapping import replaced

NAME = "tiny model"
MICROBATCHES = 2
MOST_TOKENS = 1 << 20  # limit for a microbatch of the job's own length


def is_own(step: ForwardStep | None) -> bool:
    """Return True if `step` is None or the forward step of `cp_ring.pretrain_gpt`, not a script's
    own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


def awaits_data(args: argparse.Namespace) -> bool:
    """Return True if Megatron's training loop will read a microbatch, which is probed then, and not
    a drawn one before.
    """
    if hasattr(args, "transformer_config") or settings.current().certify == "only":
        return False
    return not args.skip_train and bool(args.train_iters or args.train_samples)


def probe_losses(
    args: argparse.Namespace,
    results: Certificate,
    step: ForwardStep | None,
    seed: int,
    items: list[Item | None] | None = None,
) -> None:
    """Probe the loss and the gradients of a tiny model with the forward step of the job, or, once
    there is data, the `items` that this rank's iterators give first. Every rank calls it.
    """
    program = hasattr(args, "transformer_config")
    if program and args.build is None:
        results.not_covered.append(
            "the loss of a program that does not call cp_ring.megatron.certify"
        )
        return
    config = transformer_config(args)
    # the job's kernel may not know float32, and matrix products on CUDA may round to TF32
    kernel = "reference" if own_device().type == "cuda" else "auto"
    with (
        group_of_this_rank() as alone,
        settings.in_force(replace(settings.current(), kernel=kernel)),
    ):
        item = whole_item(items or [])
        drawn = not item and (items is not None or not awaits_data(args))
        gaps = uncovered_layers(args, config) if items is None else []
        results.not_covered += [f"{what}, in the loss" for what in gaps]
        if drawn and not program:
            results.not_covered.append("the job's own microbatches")
        for mask in [mask_of(item)] if item else _masks_of_loss(args, step):
            if reason := uncovered_states(args, mask):
                results.not_covered.append(reason)
                continue
            runs = _TinyRuns(args, config, mask, step, alone)
            kind, cp = runs.batch.kind, args.context_parallel_size
            if item:
                _probe_microbatch(runs, Batch.read(kind, cp, items or [], item), results, seed)
            elif drawn:
                _probe_microbatch(runs, Batch.draw(_long(args, kind), cp), results, seed)
            if items is None:
                _probe_loss(runs, results, seed)


def _masks_of_loss(args: argparse.Namespace, step: ForwardStep | None) -> list[str]:
    """Return the masks with which the forward step of the job is probed.

    The flags say whether a script's step takes whole or packed batch rows; a program's step takes
    one of the two. The step of `cp_ring.pretrain_gpt` has documents in place of packed rows.
    """
    masks = masks_of(args)
    if hasattr(args, "transformer_config") and "causal" in masks:
        return ["packed" if args.sft else "causal"]
    packed = not hasattr(args, "transformer_config") and not is_own(step)
    return [mask for mask in masks if mask != "packed" or packed]


class _TinyRuns:
    """A tiny model of the job, twice with the same weights: at the job's context parallel size, and
    (`whole`) that of the reference run at size 1. The forward step of the job runs in both, because
    it may compute another loss than Megatron's. `alone` is a process group of this rank only.
    """

    def __init__(
        self, args: argparse.Namespace, config: Any, mask: str, step: ForwardStep | None, alone: Any
    ) -> None:
        self.own = not hasattr(args, "transformer_config") and is_own(step)
        if self.own or step is None:
            from cp_ring.megatron.gpt import forward_step  # imports Megatron

            step = forward_step
        self.job, self.step, self.alone = args, step, alone
        kinds = find_layer_kinds(args, config, (mask,))
        tokens = max(kind.tokens for kind in kinds)
        kinds = [replace(kind, tokens=tokens) for kind in kinds]
        self.batch = Batch.draw(kinds[0], args.context_parallel_size)
        tiny = tiny_args(args, kinds)
        single = {"context_parallel_size": 1, "recompute_granularity": None}
        self.args = tiny, with_changes(tiny, single)
        self.models: list[Any] = []
        for whole in (False, True):
            with self.in_force(self.args[whole], self.batch, whole):
                self.models.append(build(self.args[whole]))
        self.models[True].load_state_dict(self.models[False].state_dict())

    def in_force(self, args: argparse.Namespace, batch: Batch, whole: bool) -> Any:
        """Put arguments and groups of one of the runs on `batch` in force."""
        if whole:
            return whole_rows_in_force(args, self.alone, batch)
        return arguments_in_force(args, one_stage(self.alone))

    def given(self, batch: Batch, whole: bool) -> Batch:
        """Return the batch of one of the runs. The job's own step needs no code of declared masks
        in the reference run.
        """
        plain = whole and self.own and not batch.items
        return replace(batch, masks=[]) if plain else batch

    def observe(self, batch: Batch, seed: int, whole: bool) -> batch_probe.Seen:
        """Return what the step makes of a microbatch."""
        args, batch = with_changes(self.args[whole], batch.kind.sizes), self.given(batch, whole)
        with self.in_force(args, batch, whole):
            return batch_probe.observe(self.models[whole], self.step, batch.delivered(seed, 1))

    def observe_stages(self, batch: Batch, seed: int, before: Any) -> list[batch_probe.Seen]:
        """Return what the step gives each virtual pipeline stage of this rank, where a whole model
        gets `before`; [] without pipeline stages, and for unknown models.
        """
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1 or "embedded" not in before:
            return []
        args = argparse.Namespace(**vars(self.job) | arguments_of_microbatch(batch.kind))
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        model, seen = self.models[False], []
        for stage in range(virtual) if virtual else [None]:
            state = {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": stage}
            with arguments_in_force(args, state), replaced((model, "vp_stage", stage)):
                data = batch.delivered(seed, 2 + (stage or 0))
                seen.append(batch_probe.observe(model, self.step, data, before))
        return seen


def _probe_loss(runs: _TinyRuns, results: Certificate, seed: int) -> None:
    """Train one step of the tiny model, and append to `results` how far losses by token, their
    average and the gradients differ from those of the reference run.
    """
    args, batch = runs.job, runs.batch
    follow_rules(runs.models[True], batch.rules)
    outcomes = []
    for whole, model in enumerate(runs.models):
        given = runs.given(batch, bool(whole))
        microbatches = [given.data(seed + i, blind=not whole) for i in range(MICROBATCHES)]
        with runs.in_force(runs.args[whole], given, bool(whole)):
            outcomes.append(train(runs.args[whole], model, microbatches, runs.step))
    ours, wanted = outcomes
    rank = compat.group_of(None, "cp").rank()
    places = batch.positions[rank].to(own_device()).repeat(MICROBATCHES, 1)
    masks = [batch.data(seed + i)["loss_mask"] for i in range(MICROBATCHES)]
    counts = torch.cat(masks).to(own_device()).gather(1, places) > 0
    sums = ours.sums and not settings.current().stock_loss_average
    exact = args.calculate_per_token_loss or sums
    rounds = args.params_dtype != torch.float32 and not settings.current().enabled
    about = NAME, batch.kind.mask
    results.probes += compare(ours, wanted, counts, places, about, exact, rounds)
    gap = "loss and gradients: the ranks average means, in which tokens weigh unlike"
    results.not_covered += [gap] * (not exact)


def _probe_microbatch(runs: _TinyRuns, batch: Batch, results: Certificate, seed: int) -> None:
    """Append to `results` what becomes of a microbatch on its way to the layers, on this rank and
    on its pipeline stages.
    """
    args, kind = runs.job, batch.kind
    about = f"microbatch of {kind.batch_size}x{kind.tokens} tokens", kind.mask
    seen, truth = (runs.observe(batch, seed, whole) for whole in (False, True))
    stages = runs.observe_stages(batch, seed, seen)
    results.probes += batch_probe.compare(seen, truth, batch, seed, about)
    results.probes += batch_probe.compare_stages(seen, stages, about)
    results.probes += [batch_probe.same_rows(batch, about)] if batch.items else []
    missing = 0 if kind.mask == "packed" else args.micro_batch_size - kind.batch_size
    gaps = {
        "inputs of later pipeline stages": args.pipeline_model_parallel_size > 1 and not stages,
        "the microbatch at the job's own length (enable(seq_length=...) tells it)": (
            not args.seq_length
        ),
        f"labels and weights of {missing} of {args.micro_batch_size} batch rows": missing,
    }
    for name in ("tokens", "labels", "weights"):
        hidden = f"each {batch_probe.NAMES[name]} at the job's own length"
        gaps[f"{hidden} (the forward step hides it)"] = name not in seen
    shown = {probe.name for probe in results.probes}
    gaps["labels, which are not the next tokens"] = (
        "weights" in seen and batch_probe.NEXT not in shown
    )
    results.not_covered += [gap for gap in gaps if gaps[gap]]
    rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
    tokens = runs.batch.kind.tokens
    if rotates and tokens < args.seq_length and batch_probe.NAMES["rotary"] not in shown:
        reach = f"{tokens} of {args.seq_length} tokens for rotary embeddings"
        results.up_to[" under ".join(about)] = reach


def _long(args: argparse.Namespace, kind: LayerKind) -> LayerKind:
    """Return the kind of a microbatch of the job's own length, with as many batch rows as the job
    has, or as fit into `MOST_TOKENS`.
    """
    n, most = args.seq_length or kind.tokens, 1
    if kind.mask != "packed":
        most = max(1, min(args.micro_batch_size, MOST_TOKENS // n))
    elif not settings.ring().whole_rows:
        n -= n % (4 * args.context_parallel_size)
    return replace(kind, tokens=n, batch_size=most)
