"""`cp-ring bench timing-cost`: what `--cp-ring-timing` costs, in steps that are recorded and in
steps that are not.

A rank of 4 runs alone on the CPU, with its messages replaced by copies: causal attention, forward
and backward, with the kernel of the CPU. Calls take turns: with the marks recorded, and without.
What a mark costs where nothing is recorded is too little to be seen so; it is timed by itself and
multiplied by the number of marks of a call.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

_CP, _RANK, _HEADS, _SIZE = 4, 1, 8, 64


def run(tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Results {what, call_ms, cost}: the share of a call's time that it costs to record, and not to
    record.

    tokens: those of the rank. The first is the median over `repeats` pairs of calls of their ratio,
    less 1. The time is that of
    this thread on a core, so that other work on the machine counts as little as it can.
    """
    from cp_ring import Layout, Mask, Plan, ring_attention
    from cp_ring.comm.transport import count
    from cp_ring.observe import timing
    from cp_ring.testing.loopback import LoopbackTransport

    class Counted(LoopbackTransport):
        def post(self, batch: Any) -> Any:
            count(batch)
            return super().post(batch)

    torch.set_num_threads(1)
    n = tokens * _CP
    plan = Plan.build(Mask.causal(n), Layout.zigzag(n, _CP), schedule="ring")
    inputs = [torch.randn(1, tokens, _HEADS, _SIZE, requires_grad=True) for _ in range(3)]
    attend = partial(ring_attention, *inputs, Counted(_RANK, _CP), plan=plan, kernel="cpu")

    def call() -> float:
        begin = time.thread_time()
        torch.autograd.grad(attend().sum(), inputs)
        return time.thread_time() - begin

    def recorded() -> tuple[float, timing.Recording]:
        begin = time.thread_time()
        with timing.record() as recording:
            call()
        return time.thread_time() - begin, recording

    for _ in range(3):
        recorded()
    pairs = []
    for index in range(repeats):
        first, second = (recorded()[0], call()) if index % 2 else (call(), recorded()[0])
        pairs.append((first, second) if index % 2 == 0 else (second, first))
    alone = median(without for without, _ in pairs)
    marks = sum(
        len(one.hops) + len(one.waits) + len(one.posts) + 1 for one in recorded()[1].resolve()
    )
    return [
        {
            "what": "recorded",
            "call_ms": alone * 1e3,
            "cost": median(with_ / without for without, with_ in pairs) - 1,
        },
        {
            "what": "not recorded",
            "call_ms": alone * 1e3,
            "cost": marks * _idle_mark() / alone,
            "marks": marks,
        },
    ]


def _idle_mark(count: int = 20_000) -> float:
    """Seconds of the dearest mark where nothing is recorded: the least of five measurements, less
    the loop.
    """
    from cp_ring.observe.spans import span

    hop = SimpleNamespace(index=1, pairs=1)

    def measure(marked: bool) -> float:
        begin = time.thread_time()
        if marked:
            for _ in range(count):
                with span("forward", hop):
                    pass
        else:
            for _ in range(count):
                pass
        return time.thread_time() - begin

    return (min(measure(True) for _ in range(5)) - min(measure(False) for _ in range(5))) / count
