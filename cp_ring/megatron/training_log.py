"""Records a run in its run directory: a line per step in steps.jsonl (losses, tokens per second, memory), and DONE at the end."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.observe import progress


class StepLine:
    """Wraps Megatron's `training_log`: calls it, then writes the step to TensorBoard and to the run directory, if there is one.

    Nothing is printed: Megatron has printed the step, and `cp-ring train` shows the lines of the run directory.

    The clock is Megatron's own `interval-time`, which stands still during checkpoints and evaluation.
    get_args, get_timers, get_writer: Megatron's functions for its arguments, timers and TensorBoard writer.
    """

    def __init__(
        self,
        training_log: Callable[..., Any],
        get_args: Callable[[], Any],
        get_timers: Callable[[], Any],
        get_writer: Callable[[], Any],
    ) -> None:
        self.training_log = training_log
        self.get_args = get_args
        self.get_timers = get_timers
        self.get_writer = get_writer
        self.seconds = 0.0
        self.samples: int | None = None

    def __call__(self, loss_dict: dict[str, torch.Tensor], *rest: Any, **named: Any) -> Any:
        result = self.training_log(loss_dict, *rest, **named)
        args = self.get_args()
        step, first = args.curr_iteration + 1, self.samples is None
        if not first and step % args.log_interval:
            return result
        done = self.samples if self.samples is not None else args.consumed_train_samples - args.global_batch_size
        seconds = self.get_timers()("interval-time").active_time()
        rate = (args.consumed_train_samples - done) * args.seq_length / max(seconds - self.seconds, 1e-9)
        self.samples, self.seconds = args.consumed_train_samples, seconds
        self._report(step, loss_dict, rate, peak_memory())
        return result

    def _report(self, step: int, losses: dict[str, torch.Tensor], rate: float, memory: int) -> None:
        writer = self.get_writer()
        if writer:
            writer.add_scalar("tokens per second", rate, step)
            writer.add_scalar("peak memory of a rank (bytes)", memory, step)
        if dist.get_rank() == dist.get_world_size() - 1:  # the last pipeline stage is where the loss is
            folder = getattr(self.get_args(), "cp_ring_run_dir", "")
            if folder:
                values = {name: float(value) for name, value in losses.items()}
                progress.append(folder, step, {**values, "tokens per second": round(rate, 1), "memory": memory})


def peak_memory() -> int:
    """The largest memory of any rank, in bytes: what CUDA's allocator reserved or, without CUDA, what was resident."""
    cuda = torch.cuda.is_available()
    held = torch.cuda.max_memory_reserved() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    largest = torch.tensor(held, dtype=torch.int64, device="cuda" if cuda else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def finish(folder: str) -> None:
    """Marks on rank 0 that the job needs no more starts: call it where training has returned.

    Megatron ends the process where it stops before the last step (signal, --exit-duration-in-mins, ...).
    """
    if folder and int(os.environ.get("RANK", "0")) == 0:
        os.makedirs(folder, exist_ok=True)
        progress.finish(folder, _wanted() or 0)


def all_steps_done() -> bool:
    """Whether Megatron's training loop has come to its last step."""
    wanted = _wanted()
    args = _arguments()
    done = max(getattr(args, "curr_iteration", -1) + 1, getattr(args, "iteration", None) or 0)
    return wanted is not None and done >= wanted


def _wanted() -> int | None:
    """The step at which training ends; None where Megatron's training loop has not been asked for any."""
    return getattr(_arguments(), "train_iters", None)


def _arguments() -> object:
    """Megatron's, as they are now; None for a script that has none."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
