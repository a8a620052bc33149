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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.microbatch_mask import KEY
from cp_ring.megatron.certificate import batch_probe
from cp_ring.megatron.certificate.batch import Batch, own_device, shared_items
from cp_ring.megatron.certificate.layer_kinds import find_layer_kinds, masks_of
from cp_ring.megatron.certificate.reference_run import follow_rules, whole_rows_in_force
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tiny_model import (
    arguments_in_force,
    arguments_of_microbatch,
    build,
    group_of_this_rank,
    one_stage,
    tiny_args,
    transformer_config,
    uncovered_layers,
    with_changes,
)
from cp_ring.megatron.flags.layer_pattern import RECURRENT, letters_of
from cp_ring.megatron.wrapping import replaced
from cp_ring.plan.sizes.attention_sizes import widening

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]

NAME = "tiny model"
MICROBATCHES = 2


def is_own(step: ForwardStep | None) -> bool:
    """Return True if `step` is None or the forward step of `cp_ring.pretrain_gpt`, not a script's
    own.
    """
    return step is None or getattr(step, "__module__", "") == "cp_ring.megatron.gpt"


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
    own, config = not program and is_own(step), transformer_config(args)
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
        elif not shared and (program or own):  # which has documents in place of packed batch rows
            masks = tuple(mask for mask in masks if mask != "packed")
        by_rank = getattr(args, "sequence_parallel", False) and args.tensor_model_parallel_size > 1
        for mask in masks:
            if by_rank and mask != "causal" and {*letters_of(args)} & {*RECURRENT}:
                # a tensor-parallel rank has a part of a document
                gap = f"the loss of recurrent layers under {mask} with --sequence-parallel"
                results.not_covered.append(gap)
                continue
            runs = _TinyRuns(args, config, mask, None if own else step, alone)
            if shared:
                batch = Batch.read(mask, shared, args.context_parallel_size)
                _probe_microbatch(runs, batch, results, seed)
            elif drawn:
                _probe_microbatch(runs, runs.draw(args.seq_length), results, seed)
            if items is None:
                _probe_loss(runs, results, seed)


@dataclass(frozen=True)
class Outcome:
    """The results of a step: losses of this rank's tokens [b, s], with the batch rows of all
    microbatches, the reported loss, and gradients by parameter.

    `sums` is true if the loss function returns a number of tokens and reports a sum and a number,
    which Megatron adds up over ranks. Megatron averages a mean over ranks.
    """

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]
    sums: bool


def _train(
    args: argparse.Namespace, model: Any, microbatches: list[dict[str, Any]], step: ForwardStep
) -> Outcome:
    """Run forward, backward and the reduction of gradients on `microbatches`, as Megatron's
    training loop does.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    batch_size, n = microbatches[0]["tokens"].shape
    seen: list[Tensor] = []
    returned: set[int] = set()

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().reshape(batch_size, -1).double())

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = loss(*args, **kwargs)
            returned.add(len(outputs))
            return outputs

        return output, counted

    average = getattr(args, "ddp_average_in_collective", False)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=average)
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.model_type = ModelType.encoder_or_decoder
    wrapped.zero_grad_buffer()
    reports = forward_backward_no_pipelining(
        forward_step_func=observed,
        data_iterator=iter(microbatches),
        model=[wrapped],
        num_microbatches=len(microbatches),
        seq_length=n,
        micro_batch_size=batch_size,
        forward_only=False,
    )
    wrapped.grad_accs.clear()  # breaks a cycle through autograd, which would keep the model
    report = sum(next(iter(each.values())).detach().double().reshape(-1) for each in reports)
    dist.all_reduce(
        report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    gradients = {
        name: parameter.main_grad.detach().double().clone()
        for name, parameter in wrapped.module.named_parameters()
    }
    sums = len(report) == 2 and returned == {3}
    return Outcome(torch.cat(seen), float(report[0] / report[-1]), gradients, sums)


class _TinyRuns:
    """A tiny model of the job, twice with the same weights: at the job's context parallel size, and
    (`whole`) that of the reference run at size 1. The forward step of the job runs in both, because
    it may compute another loss than Megatron's; None is that of `cp_ring.pretrain_gpt`. `alone` is
    a process group of this rank only.
    """

    def __init__(
        self, args: argparse.Namespace, config: Any, mask: str, step: ForwardStep | None, alone: Any
    ) -> None:
        self.own = step is None
        if step is None:
            from cp_ring.megatron.gpt import forward_step  # imports Megatron

            step = forward_step
        self.job, self.mask, self.step, self.alone = args, mask, step, alone
        kinds = find_layer_kinds(args, config)
        self.tokens = max(kind.tokens for kind in kinds)
        tiny = tiny_args(args, kinds)
        single = {"context_parallel_size": 1, "recompute_granularity": None}
        self.args = tiny, with_changes(tiny, single)
        self.batch = self.draw(self.tokens)
        self.models: list[Any] = []
        for whole in (False, True):
            with self.in_force(self.batch, whole) as args:
                self.models.append(build(args))
        self.models[True].load_state_dict(self.models[False].state_dict())

    def draw(self, n: int) -> Batch:
        """Draw a microbatch of the job with batch rows of `n` tokens, if it is known."""
        job = self.job
        return Batch.draw(
            self.mask, job.micro_batch_size, n or self.tokens, job.context_parallel_size
        )

    def given(self, batch: Batch, whole: bool) -> Batch:
        """Return the batch of one of the runs. The job's own step needs no code of declared masks
        in the reference run of a drawn one.
        """
        if not (whole and self.own and len(batch.items) == 1):
            return batch
        item = {name: x for name, x in batch.items[0].items() if name != KEY}
        return replace(batch, items=[item])

    @contextmanager
    def in_force(self, batch: Batch, whole: bool) -> Iterator[argparse.Namespace]:
        """Put arguments and groups of one of the runs on `batch` in force."""
        args = with_changes(self.args[whole], arguments_of_microbatch(batch))
        rows = whole_rows_in_force(batch.rules, KEY in batch.items[0]) if whole else nullcontext()
        with arguments_in_force(args, one_stage(self.alone, whole)), rows:
            yield args

    def observe(self, batch: Batch, seed: int, whole: bool) -> batch_probe.Seen:
        """Return what the step makes of a microbatch."""
        batch = self.given(batch, whole)
        with self.in_force(batch, whole):
            return batch_probe.observe(self.models[whole], self.step, batch.delivered(seed, 1))

    def observe_stages(self, batch: Batch, seed: int, before: Any) -> list[batch_probe.Seen]:
        """Return what the step gives each virtual pipeline stage of this rank, where a whole model
        gets `before`; [] without pipeline stages, and for unknown models.
        """
        from megatron.core import parallel_state

        if parallel_state.get_pipeline_model_parallel_world_size() == 1 or "embedded" not in before:
            return []
        args = argparse.Namespace(**vars(self.job) | arguments_of_microbatch(batch))
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        model, seen = self.models[False], []
        for stage in range(virtual) if virtual else [None]:
            state = {"_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": stage}
            with arguments_in_force(args, state), replaced((model, "vp_stage", stage)):
                data = batch.delivered(seed, 2 + (stage or 0))
                seen.append(batch_probe.observe(model, self.step, data, before))
        return seen

    def train(self, seed: int, whole: bool) -> Outcome:
        """Train one step on two microbatches. Labels that the loss mask hides are others in the
        reference run.
        """
        batch = self.given(self.batch, whole)
        items = [batch.trained(seed + i, blind=not whole) for i in range(MICROBATCHES)]
        with self.in_force(batch, whole) as args:
            return _train(args, self.models[whole], items, self.step)


def _probe_loss(runs: _TinyRuns, results: Certificate, seed: int) -> None:
    """Train one step of the tiny model, and append to `results` how far losses by token, their
    average and the gradients differ from those of the reference run.

    Only the losses of tokens are compared if the ranks average means. The labels of tokens without
    a weight in the loss differ between the runs, and must change nothing.
    """
    args, batch = runs.job, runs.batch
    follow_rules(runs.models[True], batch.rules)
    ours, truth = (runs.train(seed, whole) for whole in (False, True))
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


def _probe_microbatch(runs: _TinyRuns, batch: Batch, results: Certificate, seed: int) -> None:
    """Append to `results` what becomes of a microbatch on its way to the layers, on this rank and
    on its pipeline stages.
    """
    args, (b, n) = runs.job, batch.shape
    about = f"microbatch of {b}x{n} tokens", batch.mask
    seen, truth = (runs.observe(batch, seed, whole) for whole in (False, True))
    stages = runs.observe_stages(batch, seed, seen)
    results.probes += batch_probe.compare(seen, truth, batch, seed, about)
    results.probes += batch_probe.compare_stages(seen, stages, about)
    results.probes += [batch_probe.same_rows(batch, about)] if len(batch.items) > 1 else []
    missing = 0 if batch.mask == "packed" else args.micro_batch_size - b
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
    if rotates and runs.tokens < args.seq_length and batch_probe.NAMES["rotary"] not in shown:
        reach = f"{runs.tokens} of {args.seq_length} tokens for rotary embeddings"
        results.up_to[" under ".join(about)] = reach
