"""`cp-ring bench host`: time of the host in a hop, beyond the kernel and the messages.

A rank of 8, and one without others, runs alone on the CPU: causal attention, one source a hop,
batch 1, 4 heads, tiny tiles. The kernel and the transport compute and move nothing. What is left is
what the host of a GPU does between two launches of attention: Python, the launches of merges and
sums, and views.

This file is also a program. It measures the cp_ring that it imports, which may be another version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROUNDS = 3
_RANKS = {8: 3, 1: 0}
"""Context-parallel ranks, and which one of them runs."""
_TOKENS, _HEADS, _SIZE = 256, 4, 8


def run(repeats: int, against: Path | None = None) -> list[dict[str, Any]]:
    """Results {pass, cp, hop_us, cp_ring}: microseconds of the host a hop, the least of all calls.

    Each version is measured `_ROUNDS` times, in processes of their own and in turn. The least
    counts, because other work on the machine only adds. `against` is a checkout of another version
    of cp_ring, measured too.
    """
    folders = {"this version": Path(__file__).parents[2]}
    if against:
        folders[str(against)] = against
    least: dict[tuple[str, int, str], float] = {}
    for _ in range(_ROUNDS):
        for version, folder in folders.items():
            environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-P", __file__, str(repeats)]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            for name, cp, time_us in json.loads(done.stdout):
                key = name, cp, version
                least[key] = min(time_us, least.get(key, time_us))
    names = ("pass", "cp", "cp_ring")
    return [{**dict(zip(names, key, strict=True)), "hop_us": x} for key, x in least.items()]


def measure(repeats: int) -> list[tuple[str, int, float]]:
    """(pass, ranks, microseconds of the host a hop): the least of `repeats` calls; as many before
    them do not count.
    """
    from cp_ring import Layout, Mask, Plan, ring_attention

    _register()
    results = []
    for cp, rank in _RANKS.items():
        n = cp * _TOKENS
        plan = Plan.build(Mask.causal(n), Layout.zigzag(n, cp), schedule="ring")
        inputs = [torch.zeros(1, _TOKENS, _HEADS, _SIZE, requires_grad=True) for _ in range(3)]
        attend = partial(ring_attention, *inputs, _Silent(rank, cp), plan=plan, kernel="nothing")
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(2 * repeats):
            out = _timed(attend, times["forward"])
            _timed(partial(torch.autograd.grad, out, inputs, out), times["backward"])
        hops = len(plan.rank_plan(rank).hops)
        results += [(name, cp, 1e6 * min(x[repeats:]) / hops) for name, x in times.items()]
    return results


def _timed(work: Callable[[], Any], times: list[float]) -> Any:
    """What `work` returns; appends the seconds that this thread computes for it."""
    start = time.thread_time()
    result = work()
    times.append(time.thread_time() - start)
    return result


class _Silent:
    """A transport without peers: nothing arrives, at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def post(self, batch: Any) -> Any:
        from cp_ring.comm.transport import Done

        return Done()


def _register() -> None:
    """Registers the kernel `nothing`, which computes nothing."""
    from cp_ring.kernels import REGISTRY
    from cp_ring.kernels.base import Capabilities

    class Nothing:
        name, capabilities, devices = "nothing", Capabilities(), ("cpu",)

        def rejection(self, *_: Any) -> None:
            return None

        def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
            return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])

        def backward(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Any
        ) -> tuple[Tensor, ...]:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    module = types.ModuleType("cp_ring_kernel_nothing")
    module.KERNEL = Nothing()  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    REGISTRY["nothing"] = module.__name__


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(int(sys.argv[1]))))
