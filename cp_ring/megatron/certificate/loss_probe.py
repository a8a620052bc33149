"""Probes a tiny model made from the job's flags: losses and gradients of two microbatches, against
context parallel size 1.

The model runs forward and backward of one training step as the job does: the job's split of the
batch, its forward step and loss, its recomputation, Megatron's schedule, DistributedDataParallel
and reduction of gradients. The reference run has the same weights, holds whole batch rows, and
attends by a dense mask in float64. Both compute in float32. So they differ only in context
parallelism and recomputation, and in the labels that the loss mask hides, which must not count.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from typing import Any

import torch

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.batch import Batch
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
from cp_ring.megatron.certificate.training_step import ForwardStep, Outcome, compare, train
from cp_ring.megatron.wrapping import replaced

NAME = "tiny model"
MICROBATCHES = 2
MOST_TOKENS = 1 << 20  # limit for a microbatch of the job's own length


def is_own(step: ForwardStep | None) -> bool:
    """Return True if `step` is None or the forward step of `cp_ring.pretrain_gpt`, not a script's
    own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


def probe_losses(
    args: argparse.Namespace, results: Certificate, step: ForwardStep | None, seed: int
) -> None:
    """Probe the loss and the gradients of a tiny model with the forward step of the job. Every rank
    of the job calls it.
    """
    if hasattr(args, "transformer_config") and args.build is None:
        results.not_covered.append(
            "the loss of a program that does not call cp_ring.megatron.certify"
        )
        return
    config = transformer_config(args)
    results.not_covered += [f"{what}, in the loss" for what in uncovered_layers(args, config)]
    # the job's kernel may not know float32, and matrix products on CUDA may round to TF32
    kernel = "reference" if own_device().type == "cuda" else "auto"
    with (
        group_of_this_rank() as alone,
        settings.in_force(replace(settings.current(), kernel=kernel)),
    ):
        for mask in _masks_of_loss(args, step):
            if reason := uncovered_states(args, mask):
                results.not_covered.append(reason)
                continue
            kinds = find_layer_kinds(args, config, (mask,))
            _probe_loss(args, kinds, alone, step, seed, results)


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


def _probe_loss(
    args: argparse.Namespace,
    kinds: list[LayerKind],
    alone: Any,
    step: ForwardStep | None,
    seed: int,
    results: Certificate,
) -> None:
    """Run the tiny model of `args`, whose layers are `kinds`, with the job's context parallel size
    and at size 1, and append to `results` how far losses by token, their average and the gradients
    differ. Probe a microbatch of the job's length too, on the job's pipeline stages.

    `alone` is a process group of this rank only. `step` is the job's forward step; it runs in both,
    because the step may compute another loss than Megatron's.
    """
    own = not hasattr(args, "transformer_config") and is_own(step)
    if own or step is None:
        from cp_ring.megatron.gpt import forward_step  # imports Megatron

        step = forward_step
    tokens, mask = max(kind.tokens for kind in kinds), kinds[0].mask
    kinds = [replace(kind, tokens=tokens) for kind in kinds]
    rows = [
        Batch.draw(each, args.context_parallel_size) for each in (kinds[0], _long(args, kinds[0]))
    ]
    batch, long = rows
    rank = compat.group_of(None, "cp").rank()
    mine, mine_long = (each.positions[rank].to(own_device()) for each in rows)
    about = f"microbatch of {len(mine_long)}x{long.kind.tokens} tokens", mask
    tiny = tiny_args(args, kinds)
    model, weights, seen, ours = _run(tiny, step, rows, alone, seed)
    stages = _stages(args, model, step, long, seed, seen)
    whole = with_changes(tiny, {"context_parallel_size": 1, "recompute_granularity": None})
    # the job's step then needs no code of declared masks
    rows = [replace(each, masks=[]) for each in rows] if own else rows
    *_, truth, wanted = _run(whole, step, rows, alone, seed, weights)
    masks = [batch.data(seed + i)["loss_mask"] for i in range(MICROBATCHES)]
    places = mine.repeat(MICROBATCHES, 1)
    counts = torch.cat(masks).to(own_device()).gather(1, places) > 0
    sums = ours.sums and not settings.current().stock_loss_average
    exact = args.calculate_per_token_loss or sums
    data = long.data(seed, distinct=True)
    rounds = args.params_dtype != torch.float32 and not settings.current().enabled
    results.probes += compare(ours, wanted, counts, places, (NAME, mask), exact, rounds)
    results.probes += batch_probe.compare(seen, truth, data, mine_long, about)
    results.probes += batch_probe.compare_stages(seen, stages, about)
    missing = 0 if mask == "packed" else args.micro_batch_size - long.kind.batch_size
    gaps = {
        "inputs of later pipeline stages": args.pipeline_model_parallel_size > 1 and not stages,
        "loss and gradients: the ranks average means, in which tokens weigh unlike": not exact,
        "the microbatch at the job's own length (enable(seq_length=...) tells it)": (
            not args.seq_length
        ),
        f"labels and weights of {missing} of {args.micro_batch_size} batch rows": missing,
    }
    for name in ("tokens", "labels", "weights"):
        hidden = f"each {batch_probe.NAMES[name]} at the job's own length"
        gaps[f"{hidden} (the forward step hides it)"] = name not in seen
    results.not_covered += [gap for gap in gaps if gaps[gap] and gap not in results.not_covered]
    rotates = getattr(args, "position_embedding_type", "") in ("rope", "yarn", "mrope")
    shown = any(probe.name == batch_probe.NAMES["rotary"] for probe in results.probes)
    if rotates and tokens < args.seq_length and not shown:
        results.up_to[f"{NAME} under {mask}"] = f"{tokens} of {args.seq_length} tokens"


def _stages(
    args: argparse.Namespace, model: Any, step: ForwardStep, long: Batch, seed: int, whole: Any
) -> list[batch_probe.Seen]:
    """Return what `step` gives each virtual pipeline stage of this rank, of the microbatch `long`
    from which a whole model gets `whole`; [] without pipeline stages, and for unknown models.
    """
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or "embedded" not in whole:
        return []
    args = argparse.Namespace(**vars(args) | arguments_of_microbatch(long.kind))
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    seen = []
    for stage in range(virtual) if virtual else [None]:
        in_force = arguments_in_force(args, {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": stage})
        with in_force, replaced((model, "vp_stage", stage)):
            data = long.data(seed, distinct=True)
            seen.append(batch_probe.observe(model, step, data, whole))
    return seen


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


def _run(
    args: argparse.Namespace,
    step: ForwardStep,
    rows: list[Batch],
    alone: Any,
    seed: int,
    weights: Any = None,
) -> tuple[Any, Any, batch_probe.Seen, Outcome]:
    """Build the tiny model of `args` and train one step on the short one of `rows`. Return the
    model, its initial weights, the inputs that the step makes of the long one, and the outcome of
    training. The run with given `weights` is the reference run.
    """
    batch, long = rows

    def in_force(args: argparse.Namespace, batch: Batch) -> Any:
        if weights is None:
            return arguments_in_force(args, one_stage(alone))
        return whole_rows_in_force(args, alone, batch)

    with in_force(args, batch):
        model = build(args)
        if weights is not None:
            model.load_state_dict(weights)
            follow_rules(model, batch.rules)
        began = copy.deepcopy(model.state_dict())  # a step may change buffers
    with in_force(with_changes(args, long.kind.sizes), long):
        seen = batch_probe.observe(model, step, long.data(seed, distinct=True))
    blind = weights is None
    microbatches = [batch.data(seed + i, blind=blind) for i in range(MICROBATCHES)]
    with in_force(args, batch):
        return model, began, seen, train(args, model, microbatches, step)
