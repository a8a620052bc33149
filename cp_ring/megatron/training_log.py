"""Writes the times of sampled steps to TensorBoard and Weights & Biases, beside what Megatron logs
of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ring.megatron.step_timing import StepTiming


def with_times(
    training_log: Callable[..., Any], megatron: Any, timing: StepTiming
) -> Callable[..., Any]:
    """Return Megatron's `training_log` that also writes the steps that `timing` has sampled.
    `megatron` is its module `global_vars`, which has its arguments and writers.
    """

    def logged(*losses: Any, **named: Any) -> Any:
        result = training_log(*losses, **named)
        args = megatron.get_args()
        now = args.curr_iteration + 1
        for findings in timing.end_of_step(now, last=now == args.train_iters):
            scalars = {f"cp_ring/{name}": value for name, value in findings.scalars().items()}
            if writer := megatron.get_tensorboard_writer():
                for name, value in scalars.items():
                    writer.add_scalar(name, value, findings.step)
            if wandb := megatron.get_wandb_writer():
                wandb.log(scalars, now)  # wandb drops entries of an earlier step
        return result

    return logged
