"""The records of a run: a line of steps.jsonl per logged step, and the file DONE at its end.

A line has the step's losses, gradient norm, learning rate, tokens per second and memory.

`StepLine` is installed by the patch `step_line`; the entry modules call `finish` where training has
returned.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_ring.megatron.compat import arguments
from cp_ring.megatron.data.prefetch import take_waited
from cp_ring.megatron.step_timing import StepTiming
from cp_ring.megatron.wrapping import arguments_of
from cp_ring.observe import progress
from cp_ring.observe.findings import Findings

LONG_WAIT_S = 1e-3
"""A step that waits longer for the plans of its microbatches says so, in seconds."""


class StepLine:
    """Wraps Megatron's `training_log`: calls it, then writes the step to TensorBoard and to the run
    directory, if there is one.

    Nothing is printed: Megatron has printed the step, and `cp-ring train` shows the lines of the
    run directory.

    The clock is Megatron's own timer `interval-time`, which stops during checkpoints and
    evaluation.

    Args:
        training_log: Megatron's function.
        megatron: its module `global_vars`, which has its arguments, timers and writers.
        timing: follows sampled steps; None without --cp-ring-timing and --cp-ring-trace.
    """

    def __init__(
        self, training_log: Callable[..., Any], megatron: Any, timing: StepTiming | None = None
    ) -> None:
        self.training_log, self.megatron, self.timing = training_log, megatron, timing
        self.times: dict[str, Any] = {}
        self.seconds = 0.0
        self.samples: int | None = None

    def __call__(self, loss_dict: dict[str, torch.Tensor], *rest: Any, **named: Any) -> Any:
        result = self.training_log(loss_dict, *rest, **named)
        args = self.megatron.get_args()
        step, first = args.curr_iteration + 1, self.samples is None
        if self.timing is not None:
            for findings in self.timing.end_of_step(step, last=step == args.train_iters):
                self._report_times(findings, step)
        if first:
            self._begin(args)
        elif step % args.log_interval:
            return result
        before = args.consumed_train_samples - args.global_batch_size if first else self.samples
        samples = args.consumed_train_samples - before
        seconds = self.megatron.get_timers()("interval-time").active_time()
        rate = samples * args.seq_length / max(seconds - self.seconds, 1e-9)
        steps = max(1, samples // args.global_batch_size)
        memory, waited = worst_of_ranks(peak_memory(), take_waited() * 1e6 / steps)
        self.samples, self.seconds = args.consumed_train_samples, seconds
        extra = _logged(self.training_log, loss_dict, *rest, **named)
        if waited / 1e6 > LONG_WAIT_S:
            extra[progress.WAITED] = waited / 1e6
        self._report(step, loss_dict, rate, memory, extra)
        return result

    def _begin(self, args: Any) -> None:
        """The run directory of a script gets a job.yaml, by which `cp-ring status` knows it."""
        folder = getattr(args, "cp_ring_run_dir", "")
        if folder and dist.get_rank() == dist.get_world_size() - 1:
            with progress.warning_once(progress.JOB):
                progress.begin_script(Path(folder), vars(args))

    def _report(
        self,
        step: int,
        losses: dict[str, torch.Tensor],
        rate: float,
        memory: int,
        extra: dict[str, float],
    ) -> None:
        writer = self.megatron.get_tensorboard_writer()
        if writer:
            with progress.warning_once("TensorBoard's log"):
                writer.add_scalar("tokens per second", rate, step)
                writer.add_scalar("peak memory of a rank (bytes)", memory, step)
        # the last pipeline stage is where the loss is
        if dist.get_rank() == dist.get_world_size() - 1:
            folder = getattr(self.megatron.get_args(), "cp_ring_run_dir", "")
            if folder:
                values = {name: float(value) for name, value in losses.items()} | extra
                values |= {"tokens per second": round(rate, 1), "memory": memory} | self.times
                with progress.warning_once(progress.STEPS):
                    progress.append(folder, step, values)
                    self.times = {}

    def _report_times(self, findings: Findings, now: int) -> None:
        """Writes the times of a sampled step: to TensorBoard at once, to the run directory with the
        next step that is logged.
        """
        self.times = {"timing": findings.record()}
        scalars = {f"cp_ring/{name}": value for name, value in findings.scalars().items()}
        writer, wandb = self.megatron.get_tensorboard_writer(), self.megatron.get_wandb_writer()
        if writer:
            with progress.warning_once("TensorBoard's log"):
                for name, value in scalars.items():
                    writer.add_scalar(name, value, findings.step)
        if wandb:
            wandb.log(scalars, now)  # it drops what belongs to an earlier step


def _logged(training_log: Callable[..., Any], *args: Any, **named: Any) -> dict[str, float]:
    """Gradient norm and learning rate from the arguments of Megatron's log function, as far as they
    are given there.
    """
    known = arguments_of(training_log, *args, **named)
    names = {progress.GRADIENT_NORM: "grad_norm", progress.LEARNING_RATE: "learning_rate"}
    return {
        shown: float(known[name]) for shown, name in names.items() if known.get(name) is not None
    }


def peak_memory() -> int:
    """The memory of this rank, in bytes: what CUDA's allocator reserved or, without CUDA, what was
    resident.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worst_of_ranks(*values: float) -> list[int]:
    """The largest of each value over all ranks, in whole numbers. A collective of all ranks."""
    largest = torch.tensor(
        [int(x) for x in values],
        dtype=torch.int64,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(x) for x in largest.tolist()]


def finish(folder: str) -> None:
    """Writes the file DONE into `folder` on rank 0, unless `folder` is "": the job has not to be
    started again.

    Call it only where training has returned: where Megatron stops before the last step (by a
    signal, --exit-duration-in-mins, ...), it ends the process instead.
    """
    if folder and int(os.environ.get("RANK", "0")) == 0:
        with progress.warning_once(progress.DONE):
            os.makedirs(folder, exist_ok=True)
            progress.finish(folder, _wanted() or 0)


def all_steps_done() -> bool:
    """Whether Megatron's training loop has done its last step."""
    wanted = _wanted()
    args = arguments()
    done = max(getattr(args, "curr_iteration", -1) + 1, getattr(args, "iteration", None) or 0)
    return wanted is not None and done >= wanted


def _wanted() -> int | None:
    """The number of the last step; None if Megatron has no arguments, or they name none."""
    return getattr(arguments(), "train_iters", None)
