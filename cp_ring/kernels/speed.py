"""What a kernel and the memory of a device do in a second: the speeds from which times are predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from cp_ring.kernels import choose
from cp_ring.kernels.base import OPEN

_FEW = 128  # tokens of the call whose time is mostly what every call loses


def measure(device: torch.device, repeats: int = 5, megabytes: int = 32) -> dict[str, Any]:
    """Speeds {kernel, tflops, memory_gb_s, call_us} of the kernel that `auto` chooses, the best of `repeats`.

    A full mask, bfloat16 on CUDA and float32 on the CPU. Raises `KernelError` where no kernel runs on the device.
    """
    cuda = device.type == "cuda"
    tokens, heads, size = (8192, 16, 128) if cuda else (1024, 8, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    kernel = choose("auto", device=device, dtype=dtype, d=size, e=size, packed=False)

    def seconds(tokens: int) -> float:
        q, k, v = (torch.randn(1, tokens, heads, size, dtype=dtype, device=device) for _ in range(3))
        return best(lambda: kernel.forward(q, k, v, lo=-OPEN, hi=OPEN, scale=size**-0.5), repeats, cuda)

    flops = 4.0 * tokens * tokens * heads * size / seconds(tokens)
    one = torch.zeros(megabytes * 2**18, dtype=torch.float32, device=device)
    other = torch.empty_like(one)
    return {
        "kernel": type(kernel).__name__,
        "tflops": flops / 1e12,
        "memory_gb_s": 2 * one.nbytes / best(lambda: other.copy_(one), repeats, cuda) / 1e9,
        "call_us": max(seconds(_FEW) - 4.0 * _FEW * _FEW * heads * size / flops, 1e-7) * 1e6,
    }


def best(work: Callable[[], object], repeats: int, cuda: bool) -> float:
    """The least seconds of a call; the first one does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
