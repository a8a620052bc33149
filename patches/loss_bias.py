"""Measures the bias of the loss where Megatron averages the mean losses of context-parallel ranks.

Without --calculate-per-token-loss each rank divides its sum of losses by its own number of tokens
that count. The average over ranks is exact if these numbers are equal, and biased otherwise. The
first microbatches show by how much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.patches.patch import Patch, Replacement

MICROBATCHES = 8
_WITHOUT = (
    "without --calculate-per-token-loss all context-parallel ranks weigh the same, however many of "
    "their tokens count"
)
_GIVE = "give --calculate-per-token-loss"


class Meter:
    """Reads the sums and token counts that the loss functions of the first microbatches return,
    then prints the bias.
    """

    def __init__(self, group: Any, say: Callable[[str], None]) -> None:
        self.group, self.say = group, say
        self.left, self.bias, self.counts = MICROBATCHES, 0.0, [0] * group.size()

    def read(self, outputs: tuple[Any, ...]) -> None:
        """Takes what the loss function of one microbatch returned. A collective of the group.

        outputs: the sum of the losses of this rank's tokens that count, their number, and a report;
        or a mean and a report.
        """
        if not self.left:
            return
        if len(outputs) == 2:
            self.left = 0
            self.say(
                f"{_WITHOUT}; by how much is unknown, since this loss function returns a mean; "
                f"{_GIVE}"
            )
            return
        loss, num_tokens = outputs[:2]
        self.left -= 1
        mine = torch.stack([loss.detach().double().reshape(()), num_tokens.double().reshape(())])
        parts = [torch.empty_like(mine) for _ in self.counts]
        dist.all_gather(parts, mine, group=self.group)
        sums, counts = torch.stack(parts).cpu().unbind(1)
        exact = float(sums.sum() / counts.sum().clamp(min=1))
        averaged = float((sums / counts.clamp(min=1)).mean())
        bias = averaged / exact - 1 if exact else 0.0
        if abs(bias) > abs(self.bias):
            self.bias, self.counts = bias, [int(count) for count in counts]
        if not self.left and abs(self.bias) > 1e-6:
            self.say(self.line())

    def line(self) -> str:
        """The line that tells the user the bias."""
        counts = ", ".join(map(str, self.counts))
        return (
            f"{_WITHOUT}; in the first {MICROBATCHES} microbatches the loss is off by up to "
            f"{self.bias:+.2%} (tokens that count on each rank: {counts}); {_GIVE}"
        )


def metered(calc_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron's `forward_step_calc_loss`, whose third argument is the microbatch's loss
    function.
    """
    from megatron.core import parallel_state

    meters: list[Meter] = []

    @functools.wraps(calc_loss)
    def call(
        model: Any, output_tensor: Any, loss_func: Any, config: Any, *rest: Any, **named: Any
    ) -> Any:
        def tell(*args: Any, **kwargs: Any) -> Any:
            outputs = loss_func(*args, **kwargs)
            if not kwargs:  # with `non_loss_data` it returns something else
                if not meters:
                    meters.append(_meter())
                meters[0].read(outputs)
            return outputs

        split = config.context_parallel_size > 1 and parallel_state.model_parallel_is_initialized()
        unsure = loss_func is not None and split and not config.calculate_per_token_loss
        return calc_loss(
            model, output_tensor, tell if unsure else loss_func, config, *rest, **named
        )

    return call


def _meter() -> Meter:
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    groups = (
        group,
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    first = all(each.rank() == 0 for each in groups)
    return Meter(group, lambda line: print(f"cp_ring: {line}", flush=True) if first else None)


def _replacements() -> Iterator[Replacement]:
    from megatron.core.pipeline_parallel import schedules

    yield schedules, "forward_step_calc_loss", metered(schedules.forward_step_calc_loss)


PATCH = Patch(
    what="measures the bias of the loss in the first microbatches, where "
    "--calculate-per-token-loss is not given",
    why="Megatron then averages the mean losses of context-parallel ranks, which differs where "
    "loss masks are uneven",
    when="--cp-ring !--calculate-per-token-loss",
    replacements=_replacements,
)
