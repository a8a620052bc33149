"""One training step of a model, and how its outcome is compared with that of the reference run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import compat, settings
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tiny_batch import Microbatch
from cp_ring.plan.sizes.attention_sizes import widening

# Norms of errors over norms of the truth; on CUDA matrix products may round to TF32.
BOUND = {"cpu": 1e-4, "cuda": 1e-2}

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]


@dataclass(frozen=True)
class Outcome:
    """The results of a step: losses of this rank's tokens [b, s], the reported loss, gradients by
    parameter.

    `sums` tells whether the loss function reports a sum and a number of tokens, which are added up
    over ranks, and not a mean. `tokens` is the number of tokens that it returns, if it does. `pull`
    is how much the losses of this rank weigh in what is differentiated.
    """

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]
    sums: bool
    tokens: float | None
    pull: float


def train(
    args: argparse.Namespace,
    model: Any,
    batch: Microbatch,
    step: ForwardStep,
    weights: Tensor | None = None,
    reported: bool = False,
) -> Outcome:
    """Forward, backward and reduction of gradients of one microbatch, as Megatron's training loop
    runs them.

    `weights` are factors [b, n] of the losses of tokens in the gradients and, if `reported`, in the
    reported loss.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    seen: list[Tensor] = []
    pulls: list[float] = []
    tokens: list[float] = []

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().clone())
        output.register_hook(lambda gradient: pulls.append(float(gradient.abs().sum())))

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = loss(*args, **kwargs)
            tokens.extend([float(outputs[1])] if len(outputs) == 3 else [])
            return outputs

        if weights is not None:
            weighted = output * weights.to(output.device)
            output = weighted if reported else weighted + (output - weighted).detach()
        return output, counted

    known = {
        "grad_reduce_in_fp32": True,
        "average_in_collective": getattr(args, "ddp_average_in_collective", False),
    }
    config = DistributedDataParallelConfig(
        **compat.known_arguments(DistributedDataParallelConfig, known)
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.model_type = ModelType.encoder_or_decoder
    wrapped.zero_grad_buffer()
    batch_size, n = batch.data["tokens"].shape
    reports = forward_backward_no_pipelining(
        forward_step_func=observed,
        data_iterator=iter([batch.fresh()]),
        model=[wrapped],
        num_microbatches=1,
        seq_length=n,
        micro_batch_size=batch_size,
        forward_only=False,
    )
    wrapped.grad_accs.clear()  # a cycle through autograd, which would keep the model
    report = next(iter(reports[0].values())).detach().clone().double().reshape(-1)
    sums = report.numel() == 2
    report = report if sums else torch.stack([report[0], torch.ones_like(report[0])])
    dist.all_reduce(
        report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    gradients = {
        name: parameter.main_grad.detach().double().clone()
        for name, parameter in wrapped.module.named_parameters()
    }
    losses = seen[0].reshape(batch_size, -1).double()
    loss = float(report[0] / report[1])
    return Outcome(losses, loss, gradients, sums, tokens[0] if tokens else None, sum(pulls))


def compare(
    ours: Outcome,
    reference: Outcome,
    counts: Tensor,
    positions: Tensor,
    about: tuple[str, str],
) -> list[Probe]:
    """The job's outcome against that of the reference run. `counts` [b, s] tells which of this
    rank's tokens have a weight in the loss; the labels of others differ between the runs, and must
    change nothing. `about` names the model and its mask.
    """
    bound = BOUND["cuda" if ours.losses.is_cuda else "cpu"] + widening(settings.current().wire)
    truth = reference.losses.gather(1, positions)
    difference = (ours.losses - truth).masked_fill(~counts, 0.0)
    batch_row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), truth.shape[1])
    worst, error, ratio = _compare_gradients(ours, reference)
    place = f"worst at query {int(positions[batch_row, token])} of batch row {batch_row}"
    probes = (
        ("loss of each token", float(difference.norm() / truth.norm()), bound, place),
        (
            "loss",
            abs(ours.loss / reference.loss - 1),
            bound,
            f"{ours.loss:.6g}, at cp 1 {reference.loss:.6g}",
        ),
        ("gradient norm", abs(ratio - 1), bound, f"{ratio:.6g} of that at cp 1"),
        (
            "gradients",
            error,
            10 * bound,
            f"worst in {worst}; labels that the loss mask hides are others",
        ),
    )
    return [Probe(name, *about, measured, limit, where) for name, measured, limit, where in probes]


def _compare_gradients(ours: Outcome, wanted: Outcome) -> tuple[str, float, float]:
    """The parameter whose gradient is worst, its error relative to its norm, and the ratio of the
    norms of all gradients.
    """
    norms = [
        torch.stack([x.norm() for x in outcome.gradients.values()]).norm()
        for outcome in (ours, wanted)
    ]
    least = float(norms[1]) * 1e-2
    errors = {
        name: float((ours.gradients[name] - gradient).norm() / gradient.norm().clamp(min=least))
        for name, gradient in wanted.gradients.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return worst, errors[worst], float(norms[0] / norms[1])
