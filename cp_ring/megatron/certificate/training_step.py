"""One training step of a model, and how its outcome is compared with that of another one."""

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
    over ranks, and not a mean. `tokens` is the number of tokens that it returns, if it does.
    """

    losses: Tensor
    loss: float
    gradients: dict[str, Tensor]
    sums: bool
    tokens: float | None = None


def train(
    args: argparse.Namespace,
    model: Any,
    batch: Microbatch,
    step: ForwardStep,
    *weights: Tensor | None,
) -> list[Outcome]:
    """Forward, backward and reduction of gradients of one microbatch, as Megatron's training loop
    runs them.

    Once for each of `weights`, the factors [b, n] of the losses of tokens; None is 1.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType

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
    # a step may change them, as quantile balancing does
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    outcomes = []
    try:
        for factors in weights or (None,):
            outcomes.append(_train_once(wrapped, batch, step, factors))
            for buffer, before in buffers:
                buffer.copy_(before)
        return outcomes
    finally:
        # a cycle through autograd, which would keep the model and its groups alive
        wrapped.grad_accs.clear()


def _train_once(
    wrapped: Any, batch: Microbatch, step: ForwardStep, weights: Tensor | None
) -> Outcome:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    seen: list[Tensor] = []
    tokens: list[float] = []

    def observed(iterator: Any, module: Any) -> Any:
        output, loss = step(iterator, module)
        seen.append(output.detach().clone())

        def counted(*args: Any, **kwargs: Any) -> Any:
            outputs = loss(*args, **kwargs)
            tokens.extend([float(outputs[1])] if len(outputs) == 3 else [])
            return outputs

        return (output if weights is None else output * weights.to(output.device)), counted

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
    return Outcome(
        losses, float(report[0] / report[1]), gradients, sums, tokens[0] if tokens else None
    )


def compare(
    ours: Outcome,
    twins: list[Outcome],
    own: bool,
    positions: Tensor,
    about: tuple[str, str],
) -> list[Probe]:
    """The job's outcome against its twin's, of which the first has the gradients of one mean, the
    last those of averaged means.

    A script may average either way, so that its gradients are compared with both. `about` names the
    model and its mask.
    """
    plain, weighted = twins[0], twins[-1]
    bound = BOUND["cuda" if ours.losses.is_cuda else "cpu"] + widening(settings.current().wire)
    truth = plain.losses.gather(1, positions)
    difference = ours.losses - truth
    batch_row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), truth.shape[1])
    place = f"worst at query {int(positions[batch_row, token])} of batch row {batch_row}"
    possible = [weighted] if own else [weighted, plain]
    worst, error, ratio = min(
        (_compare_gradients(ours, one) for one in possible), key=lambda result: _number(result[1])
    )
    loss, difference_of_loss = min(
        ((one.loss, abs(ours.loss / one.loss - 1)) for one in ([plain] if ours.sums else possible)),
        key=lambda result: _number(result[1]),
    )
    probes = (
        ("loss of each token", float(difference.norm() / truth.norm()), bound, place),
        ("loss", difference_of_loss, bound, f"{ours.loss:.6g}, at cp 1 {loss:.6g}"),
        ("gradient norm", abs(ratio - 1), bound, f"{ratio:.6g} of that at cp 1"),
        ("gradients", error, 10 * bound, f"worst in {worst}"),
    )
    return [Probe(name, *about, measured, limit, where) for name, measured, limit, where in probes]


def compare_blind(ours: Outcome, blind: Outcome, about: tuple[str, str]) -> Probe:
    """The job's gradients against those of the same step with other labels where the loss mask is
    0: a loss that ignores the mask, such as one of further predictions, does so at any size.
    """
    worst, error, _ = _compare_gradients(blind, ours)
    bound = BOUND["cuda" if ours.losses.is_cuda else "cpu"]
    where = f"labels that the loss mask hides change {worst}"
    return Probe("gradients of hidden labels", *about, error, bound, where)


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
    worst = max(errors, key=lambda name: _number(errors[name]))
    return worst, errors[worst], float(norms[0] / norms[1])


def _number(error: float) -> float:
    return math.inf if math.isnan(error) else error
