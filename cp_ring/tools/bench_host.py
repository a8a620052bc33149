"""`cp-ring bench host`: time of the host in a hop, beyond the kernel and the messages.

A rank of 8, and one without others, runs alone on the CPU: causal attention, one source a hop,
batch 1, 4 heads, tiny tiles. The kernel and the transport compute and move nothing. What is left is
what the host of a GPU does between two launches of attention: Python, the launches of merges and
sums, and views.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.comm.transport import Done
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.base import Capabilities

_RANKS = {8: 3, 1: 0}
"""Context-parallel ranks, and which one of them runs."""
_TOKENS, _HEADS, _SIZE = 256, 4, 8


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return results {pass, cp, hop_us}: the microseconds of the host in a hop, the least of
    `repeats` calls after as many that do not count.
    """
    torch.set_num_threads(1)
    module = types.ModuleType("cp_ring_kernel_nothing")
    module.KERNEL = _Nothing()  # type: ignore[attr-defined]
    results = []
    with (
        mock.patch.dict(sys.modules, {module.__name__: module}),
        mock.patch.dict(REGISTRY, {"nothing": module.__name__}),
    ):
        for cp, rank in _RANKS.items():
            n = cp * _TOKENS
            plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp), schedule="ring")
            q, k, v = (torch.zeros(1, _TOKENS, _HEADS, _SIZE, requires_grad=True) for _ in "qkv")
            silent = _Silent(rank, cp)
            attend = partial(ring_attention, q, k, v, silent, plan=plan, kernel="nothing")
            times: dict[str, list[float]] = {"forward": [], "backward": []}
            for _ in range(2 * repeats):
                out = _timed(attend, times["forward"])
                _timed(partial(torch.autograd.grad, out, (q, k, v), out), times["backward"])
            hops = len(plan.rank_plan(rank).hops)
            for name, seconds in times.items():
                hop_us = 1e6 * min(seconds[repeats:]) / hops
                results.append({"pass": name, "cp": cp, "hop_us": hop_us})
    return results


def _timed(work: Callable[[], Any], times: list[float]) -> Any:
    """Return what `work` returns, and append the seconds that this thread computes for it."""
    start = time.thread_time()
    result = work()
    times.append(time.thread_time() - start)
    return result


class _Silent:
    """A transport without peers: nothing arrives, at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def post(self, batch: Any) -> Any:
        return Done()


class _Nothing:
    """A kernel that computes nothing."""

    name, capabilities, devices = "nothing", Capabilities(), ("cpu",)

    def rejection(self, *_: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Any
    ) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
