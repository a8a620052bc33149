"""Probe of a tiny model made from the job's flags: losses and gradients of one microbatch, against
context parallel size 1.

The model takes one training step's forward and backward as the job does: the job's split of the
batch, its forward step and loss, Megatron's schedule, DistributedDataParallel and reduction of
gradients. The reference run has the same weights, holds whole batch rows, and attends by a dense
mask in float64. Both compute in float32, so that they differ in context parallelism alone, and in
the labels that the loss mask hides, which must not count.

With --cp-ring-stock-loss-average, or where the loss function returns a mean of its rank, Megatron
averages the mean losses of the ranks, so a token on a rank where few tokens count weighs more than
one elsewhere. The reference run then gives each token that weight.
"""

from __future__ import annotations

import argparse
import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.errors import ConfigError, KernelError, PlanError
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
    whole_rows,
    whole_rows_in_force,
)
from cp_ring.megatron.certificate.report import Probe, ProbesOfRank
from cp_ring.megatron.certificate.tiny_batch import Microbatch
from cp_ring.megatron.certificate.tiny_layers import uncovered_layers
from cp_ring.megatron.certificate.tiny_model import (
    VOCABULARY,
    arguments_in_force,
    build,
    name_of,
    one_stage,
    own_device,
    tiny_args,
    transformer_config,
    uncovered,
    with_changes,
)
from cp_ring.megatron.certificate.training_step import (
    ForwardStep,
    Outcome,
    compare,
    train,
)
from cp_ring.megatron.rejection import first_line
from cp_ring.megatron.wrapping import replaced

ALIKE = 1e-3  # relative difference of what the losses of ranks weigh where their means are averaged


class NotProbed(Exception):
    """Says in words what a probe could not do, and why."""


@contextmanager
def attempting(what: str) -> Iterator[None]:
    """Errors in the block become a `NotProbed` that begins with `what`; those of cp_ring stay as
    they are.
    """
    try:
        yield
    except (NotProbed, ConfigError, PlanError, KernelError):
        raise
    except Exception as error:
        raise NotProbed(f"{what}: {shown(error)}") from error


def shown(error: BaseException) -> str:
    """The kind of an error, and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


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
                probes, missing = _probe_loss(args, kinds, alone, step, seed)
            results.loss += probes
            rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
            shown = any(probe.name == "rotary embedding" for probe in probes)
            if rotates and tokens < args.seq_length and not shown:
                limit = f"{tokens} of {args.seq_length} tokens"
                results.up_to[f"{probes[0].layer} under {mask}"] = limit
            results.not_covered += [one for one in missing if one not in results.not_covered]
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
) -> tuple[list[Probe], list[str]]:
    """Losses, loss and gradients of the tiny model of `args`, whose layers are `kinds`, and a
    microbatch of the job's length.

    `alone` is a process group of this rank only, `step` the job's forward step: that of
    `cp_ring.pretrain_gpt`, also for None, or a script's own, which then runs at context parallel
    size 1 too, because it may have a loss of its own. Returns the probes and what they do not
    cover.
    """
    own = not hasattr(args, "transformer_config") and is_own(step)
    if own or step is None:
        from cp_ring.megatron.gpt import forward_step  # imports Megatron

        step = forward_step
    step = _in_words(step)
    batch = Microbatch.draw(args, kinds[0], seed)
    long = Microbatch.draw_long(args, kinds[0], seed)
    tiny = tiny_args(args, kinds, len(batch.positions[0]))
    whole = with_changes(tiny, {"context_parallel_size": 1})
    with arguments_in_force(tiny, one_stage(alone)):
        with attempting("no tiny model can be built from the job's flags"):
            model = build(tiny)
        weights = copy.deepcopy(model.state_dict())  # a step may change buffers
        with arguments_in_force(with_changes(tiny, long.sizes), one_stage(alone)):
            seen = batch_probe.observe(model, step, long.fresh(), VOCABULARY)
        ours = train(tiny, model, batch.blind(), step)
    factors = _weights_of_ranks(args, batch, ours)
    theirs = whole_rows if own else step
    with whole_rows_in_force(whole, alone, batch, own):
        reference = build(whole)
        reference.load_state_dict(weights)
    with whole_rows_in_force(with_changes(whole, long.sizes), alone, long, own):
        truth = batch_probe.observe(reference, theirs, long.fresh(), VOCABULARY)
    with whole_rows_in_force(whole, alone, batch, own):
        follow_rules(reference, batch.batch_rows.rules)
        wanted = train(whole, reference, batch, theirs, factors, reported=not ours.sums)
    rank = compat.group_of(None, "cp").rank()
    mine, mine_long = (each.positions[rank].to(own_device()) for each in (batch, long))
    counts = batch.data["loss_mask"].to(own_device()).gather(1, mine) > 0
    mask = long.batch_rows.kind.mask
    probes = compare(ours, wanted, counts, mine, (name_of(tiny, model), kinds[0].mask))
    probes += batch_probe.compare(seen, truth, mine_long, mask)
    probes += batch_probe.compare_declared(truth, long.data, mask)
    return probes, batch_probe.uncovered(seen) + _unseen(args, long.batch_rows.kind)


def _unseen(args: argparse.Namespace, long: LayerKind) -> list[str]:
    """What the microbatch of the job's own length leaves out, in words."""
    if not args.seq_length:
        return ["the microbatch at the job's own length (enable(seq_length=...) tells it)"]
    if long.mask == "packed" or long.batch_size == args.micro_batch_size:
        return []
    return [
        f"labels and weights of {args.micro_batch_size - long.batch_size} of "
        f"{args.micro_batch_size} batch rows"
    ]


def _in_words(step: ForwardStep) -> ForwardStep:
    """The forward step and its loss function; their errors say what was called, and with what."""
    function = getattr(step, "func", step)  # of a partial
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""
    name = f"{getattr(function, '__name__', type(function).__name__)}{place}"

    call = attempting(
        f"{name} could not be called with a microbatch of tokens, labels, loss_mask and "
        "position_ids"
    )(step)

    def called(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        output, loss = call(iterator, model)
        failing = f"the loss function of {name} could not be called with the losses of tokens"
        return output, attempting(failing)(loss)

    return called


def _weights_of_ranks(args: argparse.Namespace, batch: Microbatch, ours: Outcome) -> Tensor | None:
    """How much each token weighs [b, n] where the mean losses of ranks are averaged as they are,
    relative to a mean over all tokens; None where that is the job's loss.
    """
    by_rank = settings.current().stock_loss_average or ours.tokens is None
    if args.calculate_per_token_loss or not by_rank:
        return None
    group = compat.group_of(None, "cp")
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, (ours.tokens, ours.pull), group=group)
    tokens, pulls = zip(*of_ranks, strict=True)
    if max(pulls) > min(pulls) * (1 + ALIKE):
        return None  # the loss function divides by the tokens of all ranks
    mask = batch.data["loss_mask"]
    # a script's own loss function may change the loss mask
    counts = [
        max(float(mask.gather(1, mine).sum()) if count is None else count, 1.0)
        for count, mine in zip(tokens, batch.positions, strict=True)
    ]
    weights = torch.empty_like(mask)
    for mine, count in zip(batch.positions, counts, strict=True):
        weights.scatter_(1, mine, sum(counts) / (len(counts) * count))
    return weights
