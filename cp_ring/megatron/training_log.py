"""Adds tokens per second, memory and the times of sampled steps to each step that Megatron logs to
TensorBoard.

`StepLine` is installed by the patch `step_line`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from cp_ring.megatron.step_timing import StepTiming
    from cp_ring.observe.timing import Findings


class StepLine:
    """Wraps Megatron's `training_log`: calls it, then writes the step to TensorBoard.

    The clock is Megatron's own timer `interval-time`, which stops during checkpoints and
    evaluation.

    Args:
        training_log: Megatron's function.
        megatron: its module `global_vars`, which has its arguments, timers and writers.
        timing: follows sampled steps; None without --cp-ring-timing.
    """

    def __init__(
        self, training_log: Callable[..., Any], megatron: Any, timing: StepTiming | None = None
    ) -> None:
        self.training_log, self.megatron, self.timing = training_log, megatron, timing
        self.seconds = 0.0
        self.samples: int | None = None

    def __call__(self, *losses: Any, **named: Any) -> Any:
        result = self.training_log(*losses, **named)
        args = self.megatron.get_args()
        step, first = args.curr_iteration + 1, self.samples is None
        if self.timing is not None:
            for findings in self.timing.end_of_step(step, last=step == args.train_iters):
                self._report_times(findings, step)
        if not first and step % args.log_interval:
            return result
        before = args.consumed_train_samples - args.global_batch_size if first else self.samples
        samples = args.consumed_train_samples - before
        seconds = self.megatron.get_timers()("interval-time").active_time()
        rate = samples * args.seq_length / max(seconds - self.seconds, 1e-9)
        memory = peak_memory_of_ranks()
        self.samples, self.seconds = args.consumed_train_samples, seconds
        if writer := self.megatron.get_tensorboard_writer():
            writer.add_scalar("tokens per second", rate, step)
            writer.add_scalar("peak memory of a rank (bytes)", memory, step)
        return result

    def _report_times(self, findings: Findings, now: int) -> None:
        """Write the times of a sampled step to TensorBoard and Weights & Biases."""
        scalars = {f"cp_ring/{name}": value for name, value in findings.scalars().items()}
        writer, wandb = self.megatron.get_tensorboard_writer(), self.megatron.get_wandb_writer()
        if writer:
            for name, value in scalars.items():
                writer.add_scalar(name, value, findings.step)
        if wandb:
            wandb.log(scalars, now)  # wandb drops entries of an earlier step


def peak_memory_of_ranks() -> int:
    """Return the largest peak memory of a rank in bytes: reserved by CUDA's allocator or, without
    CUDA, resident. A collective of all ranks.
    """
    if torch.cuda.is_available():
        largest = torch.tensor(torch.cuda.max_memory_reserved(), device="cuda")
    else:
        largest = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
