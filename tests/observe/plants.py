"""Slow ranks and slow links that are planted in real ranks: processes with a network namespace
each, joined by wires.

`case` is what a rank does: sampled steps of ring attention, whose times go the way of a training
job. What the last rank says of them is what a user would read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from cp_ring import ring_attention
from cp_ring.kernels.cpu import KERNEL
from cp_ring.observe import timing
from cp_ring.observe.watchdog import WATCH, Place
from tests.network import ThrottledMesh
from tests.observe.virtual_time import pairs_of
from tests.rank_pool import Ranks

RANKS = 4
SAMPLES = 4  # one more than an alarm takes: noise in one of them may delay it


@dataclass(frozen=True)
class Setting:
    """What the ranks compute in a step.

    tokens: of a rank. calls: attention calls of a step, each forward and backward. pair_s: seconds
    that a pair of query and key
    takes in place of its real time, so that the ranks take the same time on any machine; 0 for the
    real time.
    """

    tokens: int = 64
    heads: int = 4
    head_dim: int = 64
    calls: int = 1
    pair_s: float = 0.0

    @property
    def shard_bytes(self) -> int:
        """Keys and values of a rank."""
        return 2 * 4 * self.tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class Plant:
    """What is slow: `rank` by the factor `slower`, or the wire from `rank` to `to`, with `rate`
    bytes per second. Or nothing.
    """

    rank: int = -1
    to: int = -1
    slower: float = 1.0
    rate: float = 0.0

    @property
    def words(self) -> str:
        """How the line begins that names it."""
        return (
            f"slow link: messages from rank {self.rank} on "
            if self.rate
            else f"slow rank: rank {self.rank} "
        )

    def named_by(self, lines: list[str]) -> bool:
        """Whether the lines name what was planted, and nothing else."""
        if self.rank < 0:
            return not lines
        return (
            len(lines) == 1
            and lines[0].startswith(self.words)
            and (not self.rate or f" to rank {self.to} on " in lines[0])
        )


def case(
    group: Any, setting: Setting, plant: Plant, samples: int = SAMPLES
) -> tuple[list[str], list[dict[str, Any]]]:
    """A rank: the alarms of some sampled steps, and the record of each; only on the last rank."""
    from cp_ring.megatron.step_timing import StepTiming

    said: list[str] = []
    timing.SAMPLER.value = sampler = timing.Sampler(1)
    steps = StepTiming(sampler, lambda: group, said.append)
    own = replace(plant, slower=1.0) if plant.rank != dist.get_rank(group) or plant.rate else plant
    q, k, v = (
        torch.randn(1, setting.tokens, setting.heads, setting.head_dim, requires_grad=True)
        for _ in range(3)
    )

    def call() -> None:
        ring_attention(q, k, v, group, causal=True, kernel="cpu").sum().backward()

    records = []
    try:
        with slowed(own.slower, setting.pair_s):
            timing.SAMPLER.value = None
            call()  # connections and plans are made in the first call
            timing.SAMPLER.value = sampler
            for step in range(1, samples + 1):
                timing.at_step(step)
                WATCH.place = Place(step, 1, 0)
                for _ in range(setting.calls):
                    call()
                records += [
                    found.record() for found in steps.end_of_step(step, last=step == samples)
                ]
    finally:
        timing.SAMPLER.value, WATCH.place = None, Place()
    return [line.removeprefix("cp_ring: warning: ") for line in said if "warning" in line], records


@contextlib.contextmanager
def slowed(factor: float, pair_s: float) -> Iterator[None]:
    """Kernel calls of this process take `factor` times as long, of their own time or of `pair_s` a
    pair.
    """

    def slow(kernel: Any) -> Any:
        def run(*tensors: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = kernel(*tensors, **named)
            took = time.perf_counter() - begin
            time.sleep(
                max(0.0, pairs_of(tensors, named) * pair_s * factor - took)
                if pair_s
                else (factor - 1) * took
            )
            return result

        return run

    names = ("forward", "backward")
    vars(KERNEL).update({name: slow(getattr(KERNEL, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            del vars(KERNEL)[name]


def try_plant(
    ranks: Ranks, mesh: ThrottledMesh, setting: Setting, plant: Plant, samples: int = SAMPLES
) -> tuple[list[str], list[dict[str, Any]]]:
    """Plants, runs and clears away; the alarms and records of the last rank."""
    if plant.rate:
        mesh.throttle(plant.rate, plant.rank, plant.to, burst="16k")
    try:
        *_, last = ranks.run(case, RANKS, setting, plant, samples)
    finally:
        if plant.rate:
            mesh.throttle(None, plant.rank, plant.to)
    return last
