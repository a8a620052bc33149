"""Gathers the times of sampled steps in a Megatron job, one step later, on the last rank, and
writes them beside what Megatron logs of a step.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from cp_ring.megatron.adapter import compat
from cp_ring.megatron.wrapping import Function
from cp_ring.observe import timing
from cp_ring.observe.timing import Findings, RankTimes, Recording
from cp_ring.runtime import RUNTIME, Cell

_pending: Cell[Recording | None] = RUNTIME.cell(None)
"""The recording of the last step. It is read at the end of the next step, when the device has
passed its marks.
"""


def log_step(training_log: Function, *losses: Any, **named: Any) -> Any:
    """Wrap Megatron's `training_log`: also write the times of a sampled step to TensorBoard and
    Weights & Biases.
    """
    from megatron.training import global_vars as megatron

    result = training_log(*losses, **named)
    args = megatron.get_args()
    now = args.curr_iteration + 1
    for findings in end_of_step(
        now, last=now == args.train_iters or not now % (args.exit_interval or now + 1)
    ):
        scalars = {f"cp_ring/{name}": value for name, value in findings.scalars().items()}
        if writer := megatron.get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, findings.step)
        if wandb := megatron.get_wandb_writer():
            wandb.log(scalars, now)  # wandb drops entries of an earlier step
    return result


def end_of_step(step: int, last: bool) -> list[Findings]:
    """End a step. All ranks call it. The last rank returns the findings of the previous step, if
    that step was sampled, and prints their line.

    last: training ends with this step, so its own findings are returned too.
    """
    sampler = timing.SAMPLER.value
    findings = _gather(_pending.value)
    _pending.value = sampler.close(step) if sampler else None
    return findings + (_gather(_pending.value) if last else [])


def _gather(recording: Recording | None) -> list[Findings]:
    if recording is None:
        return []
    group = dist.get_process_group_ranks(compat.group_of(None, "cp"))[0]
    last = dist.get_world_size() - 1
    mine = RankTimes(dist.get_rank(), socket.gethostname(), group, *recording.seconds())
    ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == last else None
    dist.gather_object(mine, ranks, dst=last)
    ranks = [each for each in ranks or [] if each.computing]
    if not ranks:
        return []
    findings = timing.compared(recording.step, ranks)
    print(f"cp_ring: {findings.line()}", flush=True)
    return [findings]
