"""What the devices and links of this machine do in a second: measured here alone, for benches, tune
--check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.kernels import choose
from cp_ring.kernels.base import OPEN
from cp_ring.plan.costs.waves import REFERENCE
from cp_ring.testing.network import ThrottledMesh
from cp_ring.testing.rank_pool import Ranks

Clock = Callable[[], float]

_FEW = 128  # tokens of the call whose time is mostly what every call loses


def timed(
    work: Callable[[], object],
    repeats: int,
    *,
    group: Any = None,
    clock: Clock = time.perf_counter,
    cuda: bool = False,
) -> list[float]:
    """The seconds of `repeats` calls; one before them does not count. The ranks of `group` begin
    each call together.
    """
    times = []
    for _ in range(repeats + 1):
        if group is not None:
            dist.barrier(group)
        begin = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(clock() - begin)
    return times[1:]


def kernel_rates(device: torch.device, repeats: int = 5, megabytes: int = 32) -> dict[str, Any]:
    """Speeds {kernel, tflops, memory_gb_s, call_us, processors} of the kernel that `auto` chooses,
    the best of `repeats`.

    A full mask, bfloat16 on CUDA and float32 on the CPU. Raises `KernelError` where no kernel runs
    on the device.
    """
    cuda = device.type == "cuda"
    tokens, heads, size = (*REFERENCE, 128) if cuda else (1024, 8, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    kernel = choose("auto", device=device, dtype=dtype, d=size, e=size, packed=False)

    def seconds(tokens: int) -> float:
        q, k, v = (
            torch.randn(1, tokens, heads, size, dtype=dtype, device=device) for _ in range(3)
        )
        call = partial(kernel.forward, q, k, v, lo=-OPEN, hi=OPEN, scale=size**-0.5)
        return min(timed(call, repeats, cuda=cuda))

    flops = 4.0 * tokens * tokens * heads * size / seconds(tokens)
    return {
        "kernel": type(kernel).__name__,
        "tflops": flops / 1e12,
        "memory_gb_s": memory_rate(device, repeats, megabytes * 2**20) / 1e9,
        "call_us": max(seconds(_FEW) - 4.0 * _FEW * _FEW * heads * size / flops, 1e-7) * 1e6,
        "processors": torch.cuda.get_device_properties(device).multi_processor_count
        if cuda
        else None,
    }


def memory_rate(
    device: torch.device,
    repeats: int,
    size: int,
    group: Any = None,
    clock: Clock = time.perf_counter,
) -> float:
    """Bytes that a device reads and writes in a second, by copies of `size` bytes: the best of
    `repeats`.
    """
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = timed(
        lambda: target.copy_(source), repeats, group=group, clock=clock, cuda=device.type == "cuda"
    )
    return 2 * source.nbytes / (min(times) if group is None else median(times))


def product_rate(device: torch.device, repeats: int = 3) -> float:
    """FLOP per second of a matrix product, the best of `repeats`: bfloat16 on CUDA and float32 on
    the CPU.
    """
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    left = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / min(timed(lambda: left @ left, repeats, cuda=cuda))


def exchange(
    data: Tensor,
    sender: int,
    receiver: int,
    group: Any = None,
    clock: Clock = time.perf_counter,
    sent: bool = False,
) -> float:
    """Seconds until the data of `sender` has arrived, while this rank sends as much to `receiver`:
    ranks of the group.

    sent: and until this rank's own data has left. All ranks of the group call this together.
    """
    buffer = torch.empty_like(data)
    dist.barrier(group)
    start = clock()
    ops = [
        dist.P2POp(dist.irecv, buffer, group=group, group_peer=sender),
        dist.P2POp(dist.isend, data, group=group, group_peer=receiver),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works if sent else works[:1]:
        work.wait()
    if data.is_cuda:
        torch.cuda.synchronize()
    seconds = clock() - start
    for work in [] if sent else works[1:]:
        work.wait()
    return seconds


# Contestants that take turns, each made once on every rank

PREPARED: dict[str, Callable[[], Any]] = {}
"""What this process has made to be timed, by name."""


def time_prepared(group: Any, name: str) -> tuple[float, float]:
    """On a rank: seconds of one call of what is prepared under a name, by the clock and of this
    process.
    """
    if group is not None:
        dist.barrier(group)
    start = time.perf_counter(), time.process_time()
    result = PREPARED[name]()
    if isinstance(result, Tensor) and result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def in_turn[K](
    pools: Mapping[K, tuple[Any, int, str]],
    repeats: int,
    before: Callable[[K], None] | None = None,
) -> dict[K, dict[str, Any]]:
    """Results {median_s, min_s, max_s, times, cpu_s, cpu_times} of each contestant, of its slowest
    rank: seconds by the clock, and those of a process, which depend little on other programs.

    Each round calls every one once. So a slow minute of a shared machine slows all alike. pools: of
    each contestant its ranks, their number, and the name under which it is prepared there. before:
    called before each call of each of them.
    """
    rounds: dict[K, list[list[float]]] = {key: [] for key in pools}
    for _ in range(repeats):
        for key, (ranks, size, name) in pools.items():
            if before is not None:
                before(key)
            of_ranks = ranks.run(time_prepared, size, name, timeout=600)
            rounds[key].append([max(column) for column in zip(*of_ranks, strict=True)])
    results = {}
    for key, times in rounds.items():
        clock, process = (list(column) for column in zip(*times, strict=True))
        results[key] = {
            "times": clock,
            "median_s": median(clock),
            "min_s": min(clock),
            "max_s": max(clock),
            "cpu_times": process,
            "cpu_s": median(process),
        }
    return results


@contextmanager
def throttled_link(each: int = 1) -> Iterator[tuple[Ranks, Callable[[float | None], None]]]:
    """Ranks, `each` of them in each of two network namespaces that a wire joins, and a function
    that limits the bytes per second of both directions; None removes the limit.
    """
    mesh = ThrottledMesh(2)
    ranks = Ranks(2 * each, [end for end in mesh.ends for _ in range(each)])

    def throttle(bytes_per_second: float | None) -> None:
        for sender, receiver in ((0, 1), (1, 0)):
            mesh.throttle(bytes_per_second, sender, receiver)

    try:
        yield ranks, throttle
    finally:
        ranks.close()
        mesh.close()
