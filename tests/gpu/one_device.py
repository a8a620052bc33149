"""One device runs every rank of a context-parallel group in turn, with the rank's exact schedule,
tiles, merges and slots.

What the network would deliver is copied within the device, on a stream of its own. No network takes
part, so this is not the speed-up of a cluster.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cp_ring.api import ring_attention
from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, AttentionKernel, choose
from cp_ring.kernels.calls import KernelCall, Statistics, kernel_calls
from cp_ring.plan import Layout, Mask, Plan
from tests.loopback import LoopbackTransport

_LEAD_CYCLES = 10_000_000  # of the device's clock, about 5 ms


@dataclass(frozen=True)
class RankSizes:
    """Sizes of one rank: `tokens` of one stream, h query heads, g key/value heads, head size d
    (queries, keys) and e (values).
    """

    tokens: int = 8192
    h: int = 32
    g: int = 8
    d: int = 128
    e: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def draw(self, tokens: int) -> list[Tensor]:
        """q, k, v, dout: [tokens, 1, heads, head size]."""
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = (self.h, self.d), (self.g, self.d), (self.g, self.e), (self.h, self.e)
        return [
            torch.randn(tokens, 1, *x, generator=generator, device=self.device, dtype=self.dtype)
            for x in shapes
        ]


def replay(
    plan: Plan,
    rank: int,
    sizes: RankSizes,
    *,
    kernel: str = "auto",
    repeats: int = 5,
) -> dict[str, Any]:
    """Times one rank: seconds of forward, and of forward and backward; and its peak memory beyond
    q, k, v, out and lse, in bytes. Raises `KernelError` where the kernel does not support the case.
    """
    device = torch.device(sizes.device)
    rank_plan = plan.rank_plan(rank)
    kernel = choose(
        kernel, device=device, dtype=sizes.dtype, d=sizes.d, e=sizes.e, packed=rank_plan.packed
    ).name
    transport = LoopbackTransport(rank, plan.cp) if plan.cp > 1 else None
    q, k, v, dout = sizes.draw(rank_plan.num_tokens)

    def forward() -> Tensor:
        return ring_attention(q, k, v, transport, plan=rank_plan, kernel=kernel, qkv_format="sbhd")

    inputs = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(forward(), inputs, dout)

    times = _both_ways(torch.no_grad()(forward), both, device, repeats)
    if transport:
        transport.bytes_received = 0
    extra = _peak_bytes(both, device)
    return {
        "rank": rank,
        "kernel": kernel,
        **times,
        "peak_extra_bytes": extra,
        "bytes_received": transport.bytes_received if transport else 0,
    }


def _both_ways(
    forward: Callable[[], object],
    both: Callable[[], object],
    device: torch.device,
    repeats: int,
) -> dict[str, float]:
    """Median seconds of forward alone, and of forward and backward; two warm-up rounds are not
    counted.
    """
    return {
        name: median([_seconds(work, device) for _ in range(repeats + 2)][2:])
        for name, work in (("forward_s", forward), ("both_s", both))
    }


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    # The device sleeps until the host has begun to enqueue the work. Otherwise the time of the
    # host's first calls would count.
    torch.cuda._sleep(_LEAD_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that were allocated at one time during `work`, beyond those allocated before
    it.
    """
    if device.type != "cuda":
        return _cpu_peak_bytes(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak_bytes(work: Callable[[], Any]) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    changes = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(itertools.accumulate(changes, initial=0))


def single_call(
    mask: Mask,
    sizes: RankSizes,
    *,
    repeats: int = 5,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The fastest kernel that attends to the whole sequence in one call, without merges and float32
    sums.

    `names` are the kernels to try; by default all but the reference. Raises `KernelError` where no
    installed kernel can.
    """
    plan = Plan.build(mask, Layout.contiguous(mask.n, 1))
    device = torch.device(sizes.device)
    rank_plan = plan.rank_plan(0)
    q, k, v, dout = sizes.draw(mask.n)
    scale, results = sizes.d**-0.5, []
    for name in names or REGISTRY:
        try:
            kernel = choose(name, device=device, dtype=sizes.dtype, d=sizes.d, e=sizes.e)
        except KernelError:
            continue
        if kernel.capabilities.slow and not names:
            continue
        calls = kernel_calls(rank_plan.hops[0], kernel.capabilities, rank_plan)
        if len(calls) == 1:
            forward = partial(calls[0].attend, kernel, q, k, v, scale)

            def both(
                call: KernelCall = calls[0],
                kernel: AttentionKernel = kernel,
                forward: Callable[[], tuple[Tensor, Tensor]] = forward,
            ) -> None:
                out, lse = forward()
                call.gradients(kernel, dout, q, k, v, out, Statistics(lse), scale)

            results.append({"kernel": name, **_both_ways(forward, both, device, repeats)})
    if not results:
        raise KernelError(
            f"no kernel attends to {mask.n} tokens with this mask in one call on {device}"
        )
    return {**min(results, key=lambda result: result["both_s"]), "all": results}
