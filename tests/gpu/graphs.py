"""The step about CUDA graphs: ring attention in a graph gives the bits of a call, on values that it
was not captured with.

On the CPU the operations of a call are recorded and repeated in place of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_ring import ring_attention
from cp_ring.kernels import determinism
from tests import recorded
from tests.gpu.job import Job
from tests.gpu.replays import causal_plan
from tests.loopback import LoopbackTransport

RANK, CP = 3, 8


class Captured:
    """A call, forward and backward, whose device work is repeated by `replay`; `results` are the
    tensors that it fills.
    """

    def __init__(self, job: Job, call: Callable[[], list[Tensor]], exact: bool = False):
        self._job, self._exact = job, exact
        if not job.cuda:
            call()
            self._operations: list[recorded.Operation] = []
            with recorded.Recording(self._operations, []):
                self.results = call()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = call()

    def replay(self) -> None:
        if self._job.cuda:
            self._graph.replay()
        else:
            with determinism(self._exact):  # emulated kernels compare it with their argument
                recorded.repeat(self._operations)


def captured(job: Job) -> None:
    """A replayed rank in a graph: elements that differ from a call with the same values, and times
    of both, for each kernel.
    """
    if not job.cuda:
        job.row(
            skipped="the capture: there is no CUDA, so the operations are recorded and repeated "
            "in its place"
        )
    for name in sorted({kernel.name for kernel in job.kernels()}):
        compare(job, name, False)
    compare(job, "auto", True)


def compare(job: Job, kernel: str, exact: bool) -> None:
    """A graph beside calls, by one kernel; `exact` asks for determinism, with which all bits must
    be equal.
    """
    tokens = job.sizes.tokens
    plan, transport = causal_plan(CP, tokens).rank_plan(RANK), LoopbackTransport(RANK, CP)
    *values, dout = job.draw(tokens, tokens)
    inputs = [x.requires_grad_() for x in values]

    def call() -> list[Tensor]:
        out = ring_attention(*inputs, transport, plan=plan, kernel=kernel, deterministic=exact)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    where: dict[str, Any] = {"kernel": kernel, "deterministic": exact, "cp": CP, "rank": RANK}
    graph = Captured(job, call, exact)
    with torch.no_grad():
        for old, new in zip((*inputs, dout), job.draw(tokens, tokens, seed=1), strict=True):
            old.copy_(new)
    graph.replay()
    job.wait()
    wanted = call()
    for name, got, its in zip(("out", "dq", "dk", "dv"), graph.results, wanted, strict=True):
        if exact or name == "out":
            job.check(
                "elements that differ from a call", int((got != its).sum()), 0, of=name, **where
            )
        else:  # additions in another order
            job.check(
                "error norm over norm, from a call",
                float((got - its).norm() / its.norm()),
                1e-2,
                of=name,
                **where,
            )
    hops = len(plan.hops) + len(plan.backward)
    times = {"graph": _seconds(job, graph.replay) / hops, "call": _seconds(job, call) / hops}
    job.row(**where, seconds_a_hop=times, graph_over_call=times["graph"] / times["call"])


def _seconds(job: Job, work: Callable[[], Any]) -> float:
    work()
    job.wait()
    start = time.perf_counter()
    for _ in range(job.repeats):
        work()
    job.wait()
    return (time.perf_counter() - start) / job.repeats
