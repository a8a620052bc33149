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
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.attention_probes import BOUNDS
from cp_ring.megatron.certificate.batch import Batch, own_device, shared_items, worst_of
from cp_ring.megatron.certificate.layer_kinds import find_layer_kinds, masks_of
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tiny_model import (
    group_of_this_rank,
    tiny_args,
    transformer_config,
    uncovered_layers,
)
from cp_ring.megatron.certificate.tiny_run import (
    MICROBATCHES,
    TinyRun,
    is_own,
    tiny_runs,
)
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of
from cp_ring.megatron.wrapping import ForwardStep


def probe_losses(
    args: argparse.Namespace,
    results: Certificate,
    step: ForwardStep | None,
    seed: int,
    items: list[Any] | None = None,
) -> None:
    """Probe the loss and the gradients of a tiny model with the forward step of the job, or, once
    there is data, the `items` that this rank's iterators give first. Every rank calls it.
    """
    program = hasattr(args, "transformer_config")
    if program and args.build is None:
        results.not_covered += ["the loss of a program that does not call cp_ring.megatron.certify"]
        return
    config = transformer_config(args)
    tiny, small = tiny_args(args, config, find_layer_kinds(args, config))
    # the job's kernel may not know float32, and matrix products on CUDA may round to TF32
    used = replace(
        settings.current(), kernel="reference" if own_device().type == "cuda" else "auto"
    )
    with group_of_this_rank() as alone, settings.in_force(used):
        shared = shared_items(items or [])
        if items is None:
            results.not_covered += [
                f"{what}, in the loss" for what in uncovered_layers(args, config)
            ]
        # a microbatch that Megatron will read, or that a program has, is probed then
        trained = items is None and (args.train_iters or args.train_samples)
        awaited = trained and not (used.certify == "only" or args.skip_train)
        drawn = not (shared or awaited)
        if drawn:
            results.not_covered += [
                "the program's own microbatches (certify takes one as microbatch=)"
                if program
                else "the job's own microbatches"
            ]
        # a program's step takes whole or packed batch rows; cp_ring's has documents in their place
        own = is_own(step) and not program
        others = "packed" if program or own else ""
        if program and args.sft:
            others = "causal"
        by_rank = getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1
        runs: list[TinyRun] = []
        # cp_ring's own step finds documents by positions, also where the data set names their ends
        item = [] if own and used.document_mask else shared[:1]
        for mask in masks_of(args, *item):
            if mask == others and not item:
                continue
            if by_rank and mask != "causal" and {*letters_of(args)} & {*RECURRENT}:
                # a tensor-parallel rank has a part of a document
                results.not_covered += [
                    f"the loss of recurrent layers under {mask} with --sequence-parallel"
                ]
                continue
            draw = partial(Batch.draw, mask, args.micro_batch_size, cp=args.context_parallel_size)
            batch = draw(n=tiny.seq_length)
            runs = runs or tiny_runs(tiny, small, args.params_dtype, batch, step, alone)
            if items is None:
                results.probes += _probe_loss(args, runs, batch, results, seed)
            if shared or drawn:
                batch = (
                    Batch.read(mask, shared, args.context_parallel_size)
                    if shared
                    else draw(n=args.seq_length or tiny.seq_length)
                )
                _probe_microbatch(args, runs, batch, results, seed)


def _probe_loss(
    args: argparse.Namespace, runs: list[TinyRun], batch: Batch, results: Certificate, seed: int
) -> Iterator[Probe]:
    """Train one step of the tiny model, and compare losses by token, their average and the
    gradients with those of the reference run.

    Only the losses of tokens are compared if the ranks average means. The labels of tokens without
    a weight in the loss differ between the runs, and must change nothing.
    """
    used, (ours, truth) = settings.current(), (run.train(batch, seed) for run in runs)
    masks = [batch.delivered(seed + i)["loss_mask"].to(own_device()) for i in range(MICROBATCHES)]
    hidden, wanted = (torch.cat([*map(batch.on_rank, each)]) for each in (masks, truth.losses))
    difference = (torch.cat(ours.losses) - wanted).masked_fill(hidden == 0, 0.0)
    # norm of the error over norm of the truth, of losses and gradients; attention may have 16 bits,
    # and matrix products on CUDA may round to TF32
    fine = args.params_dtype == torch.float32 or used.enabled
    of_losses, of_gradients = (1e-4, 1e-4) if fine and not wanted.is_cuda else (1e-2, 1e-1)
    of_losses += used.widening
    of_gradients += 10 * used.widening + used.rounding * BOUNDS[torch.bfloat16]
    about = "tiny model", batch.mask
    error = float(difference.norm() / wanted.norm())
    place = f"worst at {worst_of(difference, batch.mine.repeat(len(masks), 1))}"
    yield Probe("loss of each token", *about, error, of_losses, place)
    sums = ours.sums and not used.stock_loss_average
    if not (args.calculate_per_token_loss or sums):
        results.not_covered += [
            "loss and gradients: the ranks average means, in which tokens weigh unlike"
        ]
        return
    place = f"{ours.loss:.6g}, at cp 1 {truth.loss:.6g}"
    error = abs(ours.loss - truth.loss) / (abs(truth.loss) or math.nan)  # NaN fails
    yield Probe("loss", *about, error, of_losses, place)
    norms = {name: float(gradient.norm()) for name, gradient in truth.gradients.items()}
    least = 1e-2 * math.hypot(*norms.values())  # errors are relative to a norm of this size or more
    for name, gradient in truth.gradients.items():
        error = float((ours.gradients[name] - gradient).norm())
        error /= max(least, norms[name]) or math.nan
        place = f"worst in {name}; labels that the loss mask hides are others"
        yield Probe("gradients", *about, error, of_gradients, place)


def _probe_microbatch(
    args: argparse.Namespace, runs: list[TinyRun], batch: Batch, results: Certificate, seed: int
) -> None:
    """Append to `results` what becomes of a microbatch on its way to the layers, on this rank and
    on its pipeline stages.
    """
    seen, truth = (run.observe(batch, seed) for run in runs)
    stages = runs[0].observe_stages(args, batch, seed, seen)
    results.probes += batch_probe.compare(seen, truth, batch, seed)
    results.probes += batch_probe.compare_parts("inputs of pipeline stages", stages, seen, batch)
    whole, *rows = batch.items
    results.probes += batch_probe.compare_parts("batch rows", rows, whole, batch)
    shown = {probe.name for probe in results.probes}
    gaps = {
        "inputs of later pipeline stages": args.pipeline_model_parallel_size > 1 and not stages,
        "the microbatch at the job's own length (enable(seq_length=...) tells it)": (
            not args.seq_length
        ),
        "labels, which are not the next tokens": "weights" in seen
        and batch_probe.NEXT not in shown,
    }
    for name in ("labels", "tokens", "weights"):
        gaps[
            f"each {batch_probe.NAMES[name]} at the job's own length (the forward step hides it)"
        ] = name not in seen
    results.not_covered += [gap for gap in gaps if gaps[gap]]
    rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
    tokens = runs[0].args.seq_length
    if rotates and tokens < args.seq_length and batch_probe.NAMES["rotary"] not in shown:
        place = " under ".join(batch.about)
        results.up_to[place] = f"{tokens} of {args.seq_length} tokens for rotary embeddings"
