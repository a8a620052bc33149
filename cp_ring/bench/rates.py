"""`cp-ring bench rates`: what this machine's kernel, memory and links do in a second, as `cp-ring plan` assumes them.

The kernel is the one that `auto` chooses, on one GPU or on one thread of the CPU. A link is measured between two processes of
this machine, over gloo on the CPU and over NCCL between two GPUs, where each sends and receives at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def run(megabytes: int = 32, repeats: int = 5) -> dict[str, Any]:
    """Rates {device, kernel, tflops, memory_gb_s, call_us, link_gb_s}, the best of `repeats`; no link (None) with one GPU."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(1)
    kernel, attend = _kernel(device)
    tokens, heads, size = (8192, 16, 128) if cuda else (1024, 8, 64)
    whole = _best(attend(tokens, heads, size), repeats, cuda)
    flops = 4.0 * tokens * tokens * heads * size / whole
    few = 128
    small = _best(attend(few, heads, size), repeats, cuda)
    one = torch.zeros(megabytes * 2**18, dtype=torch.float32, device=device)
    other = torch.empty_like(one)
    memory = 2 * one.nbytes / _best(lambda: other.copy_(one), repeats, cuda)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "kernel": kernel,
        "tflops": flops / 1e12,
        "memory_gb_s": memory / 1e9,
        "call_us": max(small - 4.0 * few * few * heads * size / flops, 1e-7) * 1e6,
        "link_gb_s": _link(megabytes, repeats, cuda),
    }


def _kernel(device: torch.device) -> tuple[str, Callable[[int, int, int], Callable[[], object]]]:
    """The name of the fastest kernel, and a function that makes full calls of it for some tokens, heads and head size."""
    from cp_ring.kernels import choose
    from cp_ring.kernels.base import OPEN

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def attend(tokens: int, heads: int, size: int) -> Callable[[], object]:
        q, k, v = (torch.randn(1, tokens, heads, size, dtype=dtype, device=device) for _ in range(3))
        return lambda: chosen.forward(q, k, v, lo=-OPEN, hi=OPEN, scale=size**-0.5)

    chosen = choose("auto", device=device, dtype=dtype, d=64, e=64, packed=False)
    return type(chosen).__name__, attend


def _best(work: Callable[[], object], repeats: int, cuda: bool) -> float:
    """The least seconds of a call; the first one does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _link(megabytes: int, repeats: int, cuda: bool) -> float | None:
    from cp_ring.testing.rank_pool import Ranks

    if cuda and torch.cuda.device_count() < 2:
        return None
    ranks = Ranks(2, backend="nccl" if cuda else "gloo")
    try:
        return megabytes * 2**20 / max(ranks.run(exchange, 2, megabytes, repeats)) / 1e9
    finally:
        ranks.close()


def exchange(group: Any, megabytes: int, repeats: int) -> float:
    """The least seconds in which two ranks exchange so many MiB."""
    cuda = dist.get_backend(group) == "nccl"
    data = torch.zeros(megabytes * 2**20, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    buffer, peer = torch.empty_like(data), 1 - dist.get_rank(group)

    def both_ways() -> None:
        dist.barrier(group)
        ops = [
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer),
            dist.P2POp(dist.isend, data, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return _best(both_ways, repeats, cuda)
