"""Runs one training step of a model, and compares its outcome with that of the reference run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.certificate.report import Probe
from cp_ring.plan.sizes.attention_sizes import widening

ForwardStep = Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]


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


def train(
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


def compare(
    ours: Outcome,
    reference: Outcome,
    counts: Tensor,
    positions: Tensor,
    about: tuple[str, str],
    exact: bool,
    rounds: bool,
) -> list[Probe]:
    """Compare the job's outcome with that of the reference run, and only the losses of tokens
    unless `exact`. `counts` [b, s] says which of this rank's tokens have a weight in the loss; the
    labels of the others differ between the runs, and must change nothing. `about` names the model
    and its mask, and `rounds` says whether its attention has 16 bits.
    """
    fine = not rounds and ours.losses.device.type == "cpu"
    # norm of the error over norm of the truth, of losses and gradients; matrix products on CUDA may
    # round to TF32
    bounds = (1e-4, 1e-4) if fine else (1e-2, 1e-1)
    wider = widening(settings.current().wire)
    truth = reference.losses.gather(1, positions)
    difference = (ours.losses - truth).masked_fill(~counts, 0.0)
    batch_row, token = divmod(int(difference.abs().nan_to_num(torch.inf).argmax()), truth.shape[1])
    place = f"worst at query {int(positions[batch_row, token])} of batch row {batch_row}"
    error, bound = float(difference.norm() / truth.norm()), bounds[0] + wider
    probes = [Probe("loss of each token", *about, error, bound, place)]
    if exact:
        both = f"{ours.loss:.6g}, at cp 1 {reference.loss:.6g}"
        probes.append(Probe("loss", *about, abs(ours.loss / reference.loss - 1), bound, both))
        worst, error = _worst_gradient(ours.gradients, reference.gradients)
        place = f"worst in {worst}; labels that the loss mask hides are others"
        bound = bounds[1] + 10 * wider
        probes.append(Probe("gradients", *about, error, bound, place))
    return probes


def _worst_gradient(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter with the largest gradient error, and this error relative to the norm of
    its gradient, or to a hundredth of the norm of all gradients.
    """
    norms = torch.stack([gradient.norm() for gradient in truth.values()])
    errors = torch.stack([(ours[name] - gradient).norm() for name, gradient in truth.items()])
    errors /= norms.clamp(min=float(norms.norm()) * 1e-2)
    worst = int(errors.nan_to_num(torch.inf).argmax())
    return list(truth)[worst], float(errors[worst])
