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
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.batch import Batch, own_device, shared_items
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
    ForwardStep,
    TinyRun,
    is_own,
    tiny_runs,
)
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of
from cp_ring.plan.sizes.attention_sizes import widening

NAME = "tiny model"


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
        results.not_covered.append(
            "the loss of a program that does not call cp_ring.megatron.certify"
        )
        return
    config = transformer_config(args)
    tiny = tiny_args(args, config, find_layer_kinds(args, config))
    # the job's kernel may not know float32, and matrix products on CUDA may round to TF32
    kernel = "reference" if own_device().type == "cuda" else "auto"
    used = replace(settings.current(), kernel=kernel)
    with group_of_this_rank() as alone, settings.in_force(used):
        shared = shared_items(items or [])
        gaps = uncovered_layers(args, config) if items is None else []
        results.not_covered += [f"{what}, in the loss" for what in gaps]
        # a microbatch that Megatron will read, or that a program has, is probed then
        untrained = settings.current().certify == "only" or args.skip_train
        awaited = not untrained and items is None and (args.train_iters or args.train_samples)
        drawn = not (shared or awaited)
        if drawn:
            results.not_covered.append(
                "the program's own microbatches (certify takes one as microbatch=)"
                if program
                else "the job's own microbatches"
            )
        masks = masks_of(args, *shared[:1])
        if program and "causal" in masks:  # its step takes whole or packed batch rows
            masks = ("packed" if args.sft else "causal",)
        elif not shared and (
            program or is_own(step)
        ):  # which has documents in place of packed batch rows
            masks = tuple(mask for mask in masks if mask != "packed")
        by_rank = getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1
        for mask in masks:
            if by_rank and mask != "causal" and {*letters_of(args)} & {*RECURRENT}:
                # a tensor-parallel rank has a part of a document
                gap = f"the loss of recurrent layers under {mask} with --sequence-parallel"
                results.not_covered.append(gap)
                continue
            cp = args.context_parallel_size
            draw = partial(Batch.draw, mask, args.micro_batch_size, cp=cp)
            trained = draw(n=tiny.seq_length)
            runs = tiny_runs(tiny, trained, step, alone)
            if shared or drawn:
                n = args.seq_length or tiny.seq_length
                batch = Batch.read(mask, shared, cp) if shared else draw(n=n)
                _probe_microbatch(args, runs, batch, results, seed)
            if items is None:
                _probe_loss(args, runs, trained, results, seed)


def _probe_loss(
    args: argparse.Namespace, runs: list[TinyRun], batch: Batch, results: Certificate, seed: int
) -> None:
    """Train one step of the tiny model, and append to `results` how far losses by token, their
    average and the gradients differ from those of the reference run.

    Only the losses of tokens are compared if the ranks average means. The labels of tokens without
    a weight in the loss differ between the runs, and must change nothing.
    """
    ours, truth = (run.train(batch, seed) for run in runs)
    mine = batch.positions[compat.group_of(None, "cp").rank()].repeat(MICROBATCHES, 1)
    masks = [batch.delivered(seed + i)["loss_mask"] for i in range(MICROBATCHES)]
    hidden = (torch.cat(masks).gather(1, mine) == 0).to(own_device())
    wanted = truth.losses.gather(1, mine.to(own_device()))
    difference = (ours.losses - wanted).masked_fill(hidden, 0.0)
    row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), mine.shape[1])
    # norm of the error over norm of the truth, of losses and gradients; attention may have 16 bits,
    # and matrix products on CUDA may round to TF32
    fine = args.params_dtype == torch.float32 or settings.current().enabled
    of_losses, of_gradients = (1e-4, 1e-4) if fine and not wanted.is_cuda else (1e-2, 1e-1)
    wider, about = widening(settings.current().wire), (NAME, batch.mask)
    bound = of_losses + wider
    place = f"worst at query {int(mine[row, token])} of batch row {row}"
    error = float(difference.norm() / wanted.norm())
    results.probes.append(Probe("loss of each token", *about, error, bound, place))
    sums = ours.sums and not settings.current().stock_loss_average
    if not (args.calculate_per_token_loss or sums):
        gap = "loss and gradients: the ranks average means, in which tokens weigh unlike"
        results.not_covered.append(gap)
        return
    both = f"{ours.loss:.6g}, at cp 1 {truth.loss:.6g}"
    error = abs(ours.loss - truth.loss) / (abs(truth.loss) or math.nan)  # NaN fails
    results.probes.append(Probe("loss", *about, error, bound, both))
    bound = of_gradients + 10 * wider
    norms = {name: float(gradient.norm()) for name, gradient in truth.gradients.items()}
    least = 1e-2 * math.hypot(*norms.values())  # errors are relative to a norm of this size or more
    for name, gradient in truth.gradients.items():
        size = max(least, norms[name]) or math.nan
        error = float((ours.gradients[name] - gradient).norm()) / size
        place = f"worst in {name}; labels that the loss mask hides are others"
        results.probes.append(Probe("gradients", *about, error, bound, place))


def _probe_microbatch(
    args: argparse.Namespace, runs: list[TinyRun], batch: Batch, results: Certificate, seed: int
) -> None:
    """Append to `results` what becomes of a microbatch on its way to the layers, on this rank and
    on its pipeline stages.
    """
    seen, truth = (run.observe(batch, seed) for run in runs)
    stages = runs[0].observe_stages(args, batch, seed, seen)
    results.probes += batch_probe.compare(seen, truth, batch, seed)
    results.probes += batch_probe.compare_stages(seen, stages, batch)
    results.probes += [batch_probe.same_rows(batch)] if len(batch.items) > 1 else []
    shown = {probe.name for probe in results.probes}
    missing = 0 if batch.mask == "packed" else args.micro_batch_size - batch.shape[0]
    gaps = {
        "inputs of later pipeline stages": args.pipeline_model_parallel_size > 1 and not stages,
        "the microbatch at the job's own length (enable(seq_length=...) tells it)": (
            not args.seq_length
        ),
        f"labels and weights of {missing} of {args.micro_batch_size} batch rows": missing,
        "labels, which are not the next tokens": "weights" in seen
        and batch_probe.NEXT not in shown,
    }
    results.not_covered += [gap for gap in gaps if gaps[gap]]
    for name in sorted({"tokens", "labels", "weights"} - seen.keys()):
        gap = f"each {batch_probe.NAMES[name]} at the job's own length (the forward step hides it)"
        results.not_covered.append(gap)
    rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
    tokens = runs[0].args.seq_length
    if rotates and tokens < args.seq_length and batch_probe.NAMES["rotary"] not in shown:
        reach = f"{tokens} of {args.seq_length} tokens for rotary embeddings"
        results.up_to[" under ".join(batch.about)] = reach
