"""Probe of a tiny model made from the job's flags: losses and gradients of one microbatch, against
context parallel size 1.

The model takes one training step's forward and backward as the job does: the job's split of the
batch, its forward step and loss, Megatron's schedule, DistributedDataParallel and reduction of
gradients. The reference run has the same weights, holds whole batch rows, and attends by a dense
mask in float64. Both compute in float32, so that they differ in context parallelism alone, and in
the labels that the loss mask hides, which must not count.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.layer_kinds import (
    LayerKind,
    find_layer_kinds,
    kernel_in_float32,
    masks_of,
)
from cp_ring.megatron.certificate.reference_run import (
    follow_rules,
    uncovered_states,
    whole_rows_in_force,
)
from cp_ring.megatron.certificate.report import ProbesOfRank
from cp_ring.megatron.certificate.tiny_batch import Microbatch
from cp_ring.megatron.certificate.tiny_layers import uncovered_layers
from cp_ring.megatron.certificate.tiny_model import (
    VOCABULARY,
    arguments_in_force,
    build,
    one_stage,
    own_device,
    tiny_args,
    transformer_config,
    uncovered,
    with_changes,
)
from cp_ring.megatron.certificate.training_step import ForwardStep, compare, train
from cp_ring.megatron.wrapping import replaced

NAME = "tiny model"


def _group_of_this_rank() -> Any:
    """A process group of this rank alone, for which it waits for no other.

    Where the job's group is bound to a device, torch would split its NCCL communicator, and NCCL
    waits for all ranks of the job.
    """
    with replaced((dist.distributed_c10d._get_default_group(), "bound_device_id", None)):
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def is_own(step: ForwardStep | None) -> bool:
    """Whether `step` is the forward step of `cp_ring.pretrain_gpt`, also for None, and not a
    script's own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


def probe_losses(
    args: argparse.Namespace, results: ProbesOfRank, step: ForwardStep | None, seed: int
) -> None:
    """Probes the loss and the gradients of a tiny model, with the forward step of the job; every
    rank of the job calls it.
    """
    reason = uncovered(args)
    if reason:
        results.not_covered.append(f"the loss of {reason}")
        return
    config = transformer_config(args)
    results.not_covered += [f"{what}, in the loss" for what in uncovered_layers(args, config)]
    alone = _group_of_this_rank()
    used = settings.current()
    try:
        for mask in _masks_of_loss(args, step):
            reason = uncovered_states(args, mask)
            if reason:
                results.not_covered.append(reason)
                continue
            kinds = find_layer_kinds(args, config, (mask,), whole_rows=True)
            tokens = max(kind.tokens for kind in kinds)
            kinds = [replace(kind, tokens=tokens) for kind in kinds]
            kernel = kernel_in_float32(used.kernel, kinds[0], own_device())
            with settings.in_force(replace(used, kernel=kernel)):
                _probe_loss(args, kinds, alone, step, seed, results)
            rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
            shown = any(probe.name == batch_probe.NAMES["rotary"] for probe in results.loss)
            if rotates and tokens < args.seq_length and not shown:
                results.up_to[f"{NAME} under {mask}"] = f"{tokens} of {args.seq_length} tokens"
    finally:
        dist.destroy_process_group(alone)


def _masks_of_loss(args: argparse.Namespace, step: ForwardStep | None) -> list[str]:
    """The masks under which the forward step of the job is probed.

    A script's step takes whole batch rows and packed ones as its flags say, and that of a program
    one of the two. The step of `cp_ring.pretrain_gpt` has documents in place of packed ones.
    """
    masks = masks_of(args)
    if hasattr(args, "transformer_config") and "causal" in masks:
        return ["packed" if args.sft else "causal"]
    packed = not hasattr(args, "transformer_config") and not is_own(step)
    return [mask for mask in masks if mask != "packed" or packed]


def _probe_loss(
    args: argparse.Namespace,
    kinds: list[LayerKind],
    alone: Any,
    step: ForwardStep | None,
    seed: int,
    results: ProbesOfRank,
) -> None:
    """Losses, loss and gradients of the tiny model of `args`, whose layers are `kinds`, and a
    microbatch of the job's length.

    `alone` is a process group of this rank only, `step` the job's forward step, which runs at
    context parallel size 1 too, because it may have a loss of its own.
    """
    own = not hasattr(args, "transformer_config") and is_own(step)
    if own or step is None:
        from cp_ring.megatron.gpt import forward_step  # imports Megatron

        step = forward_step
    batch = Microbatch.draw(args, kinds[0], seed)
    long = Microbatch.draw_long(args, kinds[0], seed)
    tiny = tiny_args(args, kinds, len(batch.positions[0]))
    with arguments_in_force(tiny, one_stage(alone)):
        model = build(tiny)
        weights = copy.deepcopy(model.state_dict())  # a step may change buffers
    with arguments_in_force(with_changes(tiny, long.sizes), one_stage(alone)):
        seen = batch_probe.observe(model, step, long.fresh(), VOCABULARY)
    with arguments_in_force(tiny, one_stage(alone)):
        ours = train(tiny, model, batch.blind(), step)
    whole = with_changes(tiny, {"context_parallel_size": 1})
    whole_batch, whole_long = (each.undeclared() if own else each for each in (batch, long))
    with whole_rows_in_force(whole, alone, batch, own):
        reference = build(whole)
        reference.load_state_dict(weights)
    with whole_rows_in_force(with_changes(whole, long.sizes), alone, long, own):
        truth = batch_probe.observe(reference, step, whole_long.fresh(), VOCABULARY)
    with whole_rows_in_force(whole, alone, batch, own):
        follow_rules(reference, batch.batch_rows.rules)
        wanted = train(whole, reference, whole_batch, step)
    rank = compat.group_of(None, "cp").rank()
    mine, mine_long = (each.positions[rank].to(own_device()) for each in (batch, long))
    counts = batch.data["loss_mask"].to(own_device()).gather(1, mine) > 0
    sums = ours.sums and not settings.current().stock_loss_average
    exact = args.calculate_per_token_loss or sums
    results.loss += compare(ours, wanted, counts, mine, (NAME, kinds[0].mask), exact)
    kind = long.batch_rows.kind
    results.loss += batch_probe.compare(seen, truth, long.data, mine_long, kind.mask)
    gaps = [*batch_probe.uncovered(seen), *_unseen(args, kind)]
    if not exact:
        gaps.append("loss and gradients: the ranks average means, in which tokens weigh unlike")
    results.not_covered += [gap for gap in gaps if gap not in results.not_covered]


def _unseen(args: argparse.Namespace, long: LayerKind) -> list[str]:
    """What the microbatch of the job's own length leaves out, in words."""
    if not args.seq_length:
        return ["the microbatch at the job's own length (enable(seq_length=...) tells it)"]
    missing = args.micro_batch_size - long.batch_size
    if long.mask == "packed" or not missing:
        return []
    return [f"labels and weights of {missing} of {args.micro_batch_size} batch rows"]
