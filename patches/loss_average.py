"""Averages the loss over the tokens of all context-parallel ranks.

Without --calculate-per-token-loss Megatron divides the sum of a rank's losses by the number of its
own tokens that count, and averages these means over ranks. So a token weighs more if fewer other
tokens count on its rank. In validation with --sft Megatron averages reported losses in the same
way. This patch takes sum and number over the context-parallel group. Data-parallel ranks and
microbatches weigh as at context parallel size 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron import compat
from cp_ring.megatron.rejection import note
from cp_ring.megatron.wrapping import Function, around
from cp_ring.patches.patch import Patch, Replacement


@around
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
        group = _group_of(model)
        return average(outputs, group, not config.calculate_per_token_loss)

    split = loss_func is not None and config.context_parallel_size > 1
    return calc_loss(model, output_tensor, of_group if split else loss_func, config, *rest, **named)


def average(outputs: tuple[Any, ...], group: Any, divide: bool) -> tuple[Any, ...]:
    """Change what a loss function returned, (sum, number of tokens, report), so that Megatron's
    average over ranks is the mean loss of all tokens of `group`. A collective of `group`.

    divide: True if Megatron divides each sum by the number of that rank. Then this function divides
        the sum by the mean number of the ranks, and returns the number 1.

    In validation the reported numbers are those of the group. A mean, (mean, report), does not
    change, and a line says so.
    """
    *computed, report = outputs
    if not torch.is_grad_enabled() and isinstance(report, dict):
        report = {name: _sum_of_pair(value, group) for name, value in report.items()}
    if divide and len(computed) == 2:
        loss, count = computed
        total = count.detach().clone()
        dist.all_reduce(total, group=group)
        # in place, as Megatron divides, because its schedules may hold this tensor
        loss /= total.clamp(min=1) / group.size()
        computed = [loss, torch.ones_like(count)]
    elif divide:
        first = all(
            compat.group_of(None, name).rank() == 0 for name in ("tp", "cp", "dp")
        )  # only the last pipeline stage gets here
        note(
            "the loss function returns a mean, so that all context-parallel ranks weigh the same, "
            "however many of their tokens count: return the sum, the number of tokens and a report",
            first,
        )
    return *computed, report


def _group_of(model: Any) -> Any:
    """Return the context-parallel group of a model, which may be wrapped."""
    while not hasattr(model, "pg_collection") and hasattr(model, "module"):
        model = model.module
    return compat.group_of(getattr(model, "pg_collection", None), "cp")


def _sum_of_pair(value: Any, group: Any) -> Any:
    """Add up a reported (sum, number) over `group`; return any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.numel() == 2:
        value = value.detach().clone()
        dist.all_reduce(value, group=group)
    return value


def _replacements() -> Iterator[Replacement]:
    from megatron.core.pipeline_parallel import schedules

    name = "forward_step_calc_loss"
    yield schedules, name, _over_all_tokens(getattr(schedules, name))


PATCH = Patch(
    what="takes the mean loss over the tokens of all context-parallel ranks, without "
    "--calculate-per-token-loss and in validation with --sft",
    why="Megatron averages the mean losses of these ranks, so a token weighs more if fewer tokens "
    "count on its rank",
    needed=lambda args, options: options.enabled and not options.stock_loss_average,
    replacements=_replacements,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7513",
)
