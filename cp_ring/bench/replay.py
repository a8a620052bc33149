"""One device plays every rank of a context-parallel group in turn: its exact schedule, tiles, merges, slots and copies.

What would arrive over the network is copied within the device on a stream of its own. The slowest rank's time gives the
efficiency T_full / (cp * max over ranks of T), against the best single kernel call on the whole sequence. There is no
network in it, so this is not the speed-up of a cluster.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_ring.attention import ring_attention
from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, AttentionKernel, choose
from cp_ring.kernels.calls import KernelCall, Statistics, kernel_calls
from cp_ring.plan import Layout, Mask, RingPlan
from cp_ring.testing.loopback import LoopbackTransport


@dataclass(frozen=True)
class RankSizes:
    """Of one rank: `tokens` of one stream, h query and g key/value heads, head sizes d and e."""

    tokens: int = 8192
    h: int = 32
    g: int = 8
    d: int = 128
    e: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def draw(self, tokens: int) -> list[Tensor]:
        """q, k, v, dout, tokens first."""
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = (self.h, self.d), (self.g, self.d), (self.g, self.e), (self.h, self.e)
        return [torch.randn(tokens, 1, *x, generator=generator, device=self.device, dtype=self.dtype) for x in shapes]


def replay(plan: RingPlan, rank: int, sizes: RankSizes, *, kernel: str = "auto", num_slots: int = 2, repeats: int = 5,
           bandwidth: float | None = None) -> dict[str, Any]:  # fmt: skip
    """Times one rank's forward, and forward with backward, in seconds; its memory over q, k, v, out and lse in bytes.

    `bandwidth` in bytes a second is that of the link to pretend. Raises `KernelError` when the kernel cannot do the job.
    """
    device, rank_plan = torch.device(sizes.device), plan.rank_plan(rank)
    kernel = choose(kernel, device=device, dtype=sizes.dtype, d=sizes.d, e=sizes.e, packed=rank_plan.packed).name
    transport = LoopbackTransport(rank, plan.cp, bandwidth) if plan.cp > 1 else None
    q, k, v, dout = sizes.draw(rank_plan.num_tokens)

    def forward() -> Tensor:
        return ring_attention(q, k, v, transport, plan=rank_plan, kernel=kernel, num_slots=num_slots, qkv_format="sbhd")

    inputs = [x.requires_grad_() for x in (q, k, v)]
    times = measure(forward, inputs, dout, repeats)
    if transport:
        transport.bytes_received = 0
    extra = _peak(lambda: torch.autograd.grad(forward(), inputs, dout), device)
    received = transport.bytes_received if transport else 0
    return {"rank": rank, "kernel": kernel, **times, "peak_extra_bytes": extra, "bytes_received": received}


def measure(forward: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor, repeats: int) -> dict[str, float]:
    """Median seconds of forward alone, and of forward and backward; two warm-up rounds are not counted."""
    device = dout.device

    def both() -> None:
        torch.autograd.grad(forward(), inputs, dout)

    def alone() -> None:
        with torch.no_grad():
            forward()

    found = {}
    for name, work in (("forward_s", alone), ("both_s", both)):
        times = [_timed(work, device) for _ in range(repeats + 2)][2:]
        found[name] = statistics.median(times)
    return found


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _peak(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes that the allocator had live beyond what it had before, at most."""
    if device.type != "cuda":
        return _cpu_peak(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(work: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))


def single_call(mask: Mask, sizes: RankSizes, *, repeats: int = 5) -> dict[str, Any]:
    """The fastest kernel that attends to the whole sequence in one call, nothing around it: no merge, no float32 sums.

    Raises `KernelError` when no installed kernel can.
    """
    plan = RingPlan.build(mask, Layout.contiguous(mask.n, 1))
    device, hop = torch.device(sizes.device), plan.rank_plan(0).hops[0]
    q, k, v, dout = sizes.draw(mask.n)
    found = []
    for name in REGISTRY:
        if name == "reference":
            continue
        try:
            kernel = choose(name, device=device, dtype=sizes.dtype, d=sizes.d, e=sizes.e)
        except KernelError:
            continue
        calls = kernel_calls(hop, kernel.capabilities)
        if len(calls) == 1:
            times = _bare(calls[0], kernel, (q, k, v, dout), sizes.d**-0.5, repeats)
            found.append({"kernel": name, **times})
    if not found:
        raise KernelError(f"no kernel attends to {mask.n} tokens with this mask in one call on {device}")
    return {**min(found, key=lambda x: x["both_s"]), "all": found}


def _bare(call: KernelCall, kernel: AttentionKernel, inputs: tuple[Tensor, ...], scale: float, repeats: int) -> dict[str, float]:
    q, k, v, dout = inputs

    def both() -> None:
        out, lse = call.attend(kernel, q, k, v, scale)
        # The merged out and lse are [s, b, h, e] and [b, h, s]; a packed call gives [t, b * h, e] and [b * h, t].
        out, lse = (out.transpose(0, 1), lse) if out.dim() == 4 else (out[:, None], lse[None])
        call.gradients(kernel, dout, q, k, v, out, Statistics(lse), scale)

    works = {"forward_s": lambda: call.attend(kernel, q, k, v, scale), "both_s": both}
    return {name: statistics.median([_timed(work, q.device) for _ in range(repeats + 2)][2:]) for name, work in works.items()}


def efficiency(cp: int, mask: Mask, sizes: RankSizes, *, kernel: str = "auto", repeats: int = 5, bandwidth: float | None = None,
               whole: dict[str, Any] | None = None, layout: str = "zigzag") -> dict[str, Any]:  # fmt: skip
    """Every rank of `cp` in turn; the slowest against `whole`, which `single_call` measures unless given.

    `layout` is zigzag, or balanced for packed documents.
    """
    plan = RingPlan.build(mask, Layout.balanced(mask, cp) if layout == "balanced" else Layout.zigzag(mask.n, cp))
    whole = whole or single_call(mask, sizes, repeats=repeats)
    ranks = [replay(plan, rank, sizes, kernel=kernel, repeats=repeats, bandwidth=bandwidth) for rank in range(cp)]
    slowest = {name: max(x[name] for x in ranks) for name in ("forward_s", "both_s")}
    return {
        "name": "cp_ring",
        "what": "single-device replay, no network",
        "cp": cp,
        "tokens": mask.n,
        "layout": plan.layout.name,
        "kernel": ranks[0]["kernel"],
        "best_single_kernel": whole["kernel"],
        "bandwidth": bandwidth,
        **{f"slowest_{name}": x for name, x in slowest.items()},
        **{f"single_{name}": whole[name] for name in slowest},
        **{f"efficiency_{name[:-2]}": whole[name] / (cp * slowest[name]) for name in slowest},
        "peak_extra_bytes": max(x["peak_extra_bytes"] for x in ranks),
        "bytes_received": max(x["bytes_received"] for x in ranks),
    }
