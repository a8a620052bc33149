"""Averages the loss over the tokens of all context-parallel ranks.

Without --calculate-per-token-loss Megatron divides the sum of a rank's losses by the number of its
own tokens that count, and averages these means over ranks. So a token weighs more if fewer other
tokens count on its rank. In validation with --sft Megatron averages reported losses in the same
way. This patch takes sum and number over the context-parallel group. Data-parallel ranks and
microbatches weigh as at context parallel size 1.

Some loss functions return a mean and a report. Megatron adds up their values over the
context-parallel ranks, which is right for a mean over the tokens of all these ranks. A mean over
the tokens of one rank is divided here, and a line says so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.notes import note
from cp_ring.megatron.compat import unwrapped
from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch


def _over_all_tokens(
    calc_loss: Function,
    model: Any,
    output_tensor: Any,
    loss_func: Any,
    config: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Wrap Megatron's `forward_step_calc_loss`, which calls the loss function on the last stage."""

    def of_group(output: Any, **kwargs: Any) -> Any:
        outputs = loss_func(output, **kwargs)
        if kwargs:  # with `non_loss_data` the function returns something else
            return outputs
        group = compat.group_of(getattr(unwrapped(model), "pg_collection", None), "cp")
        if len(outputs) == 2:
            return _divided(outputs, output, group, config)
        return average(outputs, group, not config.calculate_per_token_loss)

    split = loss_func is not None and config.context_parallel_size > 1
    return calc_loss(model, output_tensor, of_group if split else loss_func, config, *rest, **named)


def average(outputs: tuple[Any, ...], group: Any, divide: bool) -> tuple[Any, ...]:
    """Change what a loss function returned, (sum, number of tokens, report), so that Megatron's
    average over ranks is the mean loss of all tokens of `group`. A collective of `group`.

    divide: True if Megatron divides each sum by the number of that rank. Then this function divides
        the sum by the mean number of the ranks, and returns the number 1.

    In validation the reported numbers are those of the group.
    """
    loss, count, report = outputs
    if not torch.is_grad_enabled() and isinstance(report, dict):
        report = {name: _sum_of_pair(value, group) for name, value in report.items()}
    if divide:
        total = count.detach().clone()
        dist.all_reduce(total, group=group)
        # in place, as Megatron divides, because its schedules may hold this tensor
        loss /= total.clamp(min=1) / group.size()
        count = torch.ones_like(count)
    return loss, count, report


def _divided(outputs: tuple[Any, Any], output: Any, group: Any, config: Any) -> tuple[Any, Any]:
    """Return what a loss function of `output` returned, (mean, report). A mean over the tokens of
    this rank is divided by the number of ranks of `group` that have tokens. A collective of `group`
    while gradients are enabled.

    The weights of the tokens in a mean add up to 1: on each rank, or on all of them together.
    Raises `ConfigError` with --calculate-per-token-loss, which needs the number of tokens.
    """
    ask = "return the sum, the number of tokens and a report"
    if config.calculate_per_token_loss:
        raise ConfigError(
            f"the loss function returns a mean, but --calculate-per-token-loss needs sums: {ask}"
        )
    loss, report = outputs
    if not output.requires_grad:
        return outputs
    said = "must be over the tokens of all context-parallel ranks"
    ranks = 1.0
    if output.dim() < 3:  # losses of tokens, not logits
        (weights,) = torch.autograd.grad(loss, output, retain_graph=True)
        weight = weights.sum(dtype=torch.float32)
        sums = torch.stack([weight, (weight != 0).float()])
        dist.all_reduce(sums, group=group)
        total, ranks = sums.tolist()
        if ranks < 2 or abs(total / ranks - 1) > 0.01:
            return outputs
        said = (
            f"is of a rank's own tokens: divided by {ranks:.0f}, the context-parallel ranks that "
            "have some, because Megatron adds up their means; these ranks weigh the same, however "
            "many of their tokens count"
        )
    first = all(compat.group_of(None, name).rank() == 0 for name in ("tp", "cp", "dp"))
    # only the last pipeline stage gets here
    note(f"the loss function returns a mean, which {said}: {ask}", first)
    return loss / ranks, report


def _sum_of_pair(value: Any, group: Any) -> Any:
    """Add up a reported (sum, number) over `group`; return any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.numel() == 2:
        value = value.detach().clone()
        dist.all_reduce(value, group=group)
    return value


PATCH = Patch(
    what="takes the mean loss over the tokens of all context-parallel ranks, without "
    "--calculate-per-token-loss and in validation with --sft",
    why="Megatron averages the mean losses of these ranks, so a token weighs more if fewer tokens "
    "count on its rank",
    needed=lambda args, options: options.enabled and not options.stock_loss_average,
    wraps={
        "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss": _over_all_tokens,
    },
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7513",
)
