"""What needs a GPU, section by section, to one JSON file; `--device cpu` runs the same script on small shapes.

Sections are written as they end, so that a run that is cut short leaves what it has. What fails says why in its
place, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from cp_ring import Layout, Mask, RingPlan, ring_attention
from cp_ring.bench import samples
from cp_ring.bench.attention import CONTESTANTS, Contest
from cp_ring.bench.attention import run as contest
from cp_ring.bench.machine import facts
from cp_ring.bench.replay import RankSizes, efficiency, replay, single_call
from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, choose
from cp_ring.ops.merge import _fused, _merge_
from cp_ring.plan.tiles import OPEN
from cp_ring.testing import conformance
from cp_ring.testing.loopback import LoopbackTransport

BUDGET_S = 450
HEADS = ((8, 8, 64, 64), (8, 1, 128, 128), (8, 2, 192, 128), (8, 2, 256, 256))


class Job:
    """The device, what is left of the time, and sizes for either."""

    def __init__(self, device: str):
        self.device, self.end = torch.device(device), time.monotonic() + BUDGET_S
        self.cuda = device == "cuda"
        self.dtypes = (torch.bfloat16, torch.float16) if self.cuda else (torch.float32, torch.bfloat16)
        self.heads = HEADS if self.cuda else ((4, 4, 16, 16), (4, 1, 24, 16))
        small = RankSizes(tokens=128, h=4, g=2, d=16, e=16, dtype=torch.float32, device="cpu")
        self.sizes = RankSizes() if self.cuda else small
        self.repeats = 5 if self.cuda else 1

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocator(self) -> dict[str, int]:
        """How often memory was allocated, and how often from the driver."""
        stats = torch.cuda.memory_stats() if self.cuda else {}
        return {name: stats[name] for name in ("allocation.all.allocated", "segment.all.allocated") if name in stats}

    def kernels(self, dtype: torch.dtype, d: int, e: int) -> dict[str, str | None]:
        """Every kernel, with the reason why it cannot serve, or None."""
        found = {name: importlib.import_module(home).KERNEL for name, home in REGISTRY.items()}
        return {name: kernel.rejection(self.device, dtype, d, e) for name, kernel in found.items()}


def kernels(job: Job) -> dict[str, Any]:
    """The conformance suite: each kernel and property, on head sizes up to 256 and groups of 8; main ones in another dtype."""
    found: dict[str, Any] = {}
    main = ("full rectangles", "causal squares", "merged backward", "varlen")
    for name, home in REGISTRY.items():
        kernel = importlib.import_module(home).KERNEL
        for dtype in job.dtypes if name != "reference" else job.dtypes[:1]:
            supported = [x for x in job.heads if kernel.rejection(job.device, dtype, *x[2:]) is None]
            result: dict[str, Any] = {"head_sizes": sorted({x[2:] for x in supported})}
            rejected = [x for x in job.heads if x not in supported]
            result["rejected"] = {str(x[2:]): kernel.rejection(job.device, dtype, *x[2:]) for x in rejected}
            for prop in (conformance.PROPERTIES if dtype == job.dtypes[0] else main) if supported else ():
                result[prop] = _outcome(partial(conformance.check, kernel, job.device, dtype, only=prop, heads=job.heads))
            found[f"{name}, {dtype}"] = result
    return found


def _outcome(work: Callable[[], None]) -> str:
    try:
        work()
        return "holds"
    except AssertionError as error:
        return str(error)
    except Exception as error:  # a launch that failed, say: the next property may still run
        return f"{type(error).__name__}: {str(error)[:400]}"


def accuracy(job: Job) -> dict[str, Any]:
    """Out and gradients of one causal call against float64, error norm over norm, at 2,048 tokens."""
    n = 2048 if job.cuda else 128
    found: dict[str, Any] = {}
    for h, g, d, e in job.heads:
        sizes = RankSizes(n, h, g, d, e, job.dtypes[0], job.device.type)
        q, k, v, dout = (x.transpose(0, 1) for x in sizes.draw(n))
        options: dict[str, Any] = {"lo": -OPEN, "hi": 0, "scale": d**-0.5}
        oracle = choose("reference", device=job.device, dtype=sizes.dtype, d=d, e=e)
        truth, lse = oracle.forward(q, k, v, **options)
        truths = (truth, *oracle.backward(dout, q, k, v, truth, lse, **options))
        for name, reason in job.kernels(sizes.dtype, d, e).items():
            if reason is None and name != "reference":
                kernel = choose(name, device=job.device, dtype=sizes.dtype, d=d, e=e)
                out, lse = kernel.forward(q, k, v, **options)
                got = (out, *kernel.backward(dout, q, k, v, out, lse, **options))
                errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, truths, strict=True)]
                found[f"{name}, {h}:{g} heads, {d} and {e}"] = errors
    return found


def rings(job: Job) -> dict[str, Any]:
    """Two processes on this device, over gloo through host memory, and over NCCL where it lets ranks share a device."""
    found: dict[str, Any] = {}
    for backend in ("gloo", "nccl") if job.cuda else ("gloo",):
        names = [name for name, reason in job.kernels(job.dtypes[0], 64, 64).items() if reason is None]
        for kernel in names if backend == "gloo" else names[:1]:
            found[f"{backend}, {kernel}"] = _ring(backend, job.device.type, kernel)
    return found


def _ring(backend: str, device: str, kernel: str, size: int = 2, limit: float = 60) -> dict[str, Any]:
    environment = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(size)]
        command = [sys.executable, "-m", "tests.gpu.ring", backend]
        rest = [str(size), f"{folder}/store", device, kernel]
        ranks = [
            subprocess.Popen([*command, str(rank), *rest, str(outs[rank])], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        end, says = time.monotonic() + limit, []
        for rank in ranks:
            try:
                says.append(rank.communicate(timeout=max(end - time.monotonic(), 1))[1][-1500:])
            except subprocess.TimeoutExpired:
                rank.kill()
                says.append(f"did not end in {limit} s: {rank.communicate()[1][-1500:]}")
        if any(rank.returncode for rank in ranks):
            return {"failed": says}
        errors = [json.loads(out.read_text()) for out in outs]
        return {name: [max(column) for column in zip(*(x[name] for x in errors), strict=True)] for name in errors[0]}


def replays(job: Job) -> list[dict[str, Any]]:
    """Efficiency of one device playing all ranks: causal at several cp; packed documents and a window at cp 8."""
    tokens, results = job.sizes.tokens, []
    cps = (1, 2, 4, 8, 16) if job.cuda else (1, 2)
    supported = [name for name, reason in job.kernels(job.sizes.dtype, job.sizes.d, job.sizes.e).items() if reason is None]
    supported = [name for name in supported if name != "reference"]
    for cp in cps:
        whole = single_call(Mask.causal(cp * tokens), job.sizes, repeats=job.repeats if cp < 16 else 2)
        for kernel in supported if cp in (1, 8) else supported[:1]:
            result = efficiency(cp, Mask.causal(cp * tokens), job.sizes, kernel=kernel, repeats=job.repeats, whole=whole)
            results.append({"mask": "causal", "single_calls": whole["all"], **result})
        if job.left < 150:
            results.append({"stopped_after_cp": cp, "why": "time"})
            break
    n = (8 if job.cuda else 2) * tokens
    masks = {"documents of 4,096 on average": Mask.documents(samples.exponential(n, n // 16, 0))}
    masks["window 4,096"] = Mask.causal(n, window=(n // 16, 0))
    for name, mask in masks.items():
        results += [{"mask": name, **_packed(mask, n // tokens, job, kernel)} for kernel in supported]
    return results


def _packed(mask: Mask, cp: int, job: Job, kernel: str) -> dict[str, Any]:
    try:
        layout = "balanced" if mask.name == "documents" else "zigzag"
        return efficiency(cp, mask, job.sizes, kernel=kernel, repeats=job.repeats, layout=layout)
    except KernelError as error:
        return {"kernel": kernel, "rejected": str(error)}


def memory(job: Job) -> list[dict[str, Any]]:
    """Peak bytes over the inputs of one forward and backward, for more and more ranks of as many tokens each."""
    results = []
    for cp in (2, 4, 8, 16, 32, 64) if job.cuda else (2, 4):
        plan = RingPlan.build(Mask.causal(cp * job.sizes.tokens), Layout.zigzag(cp * job.sizes.tokens, cp))
        results.append({"cp": cp, **replay(plan, cp - 1, job.sizes, repeats=1 if cp > 8 else 2)})
        # Two ranks use one receive buffer, more ranks two: from 4 on the peak stays.
        if cp > 4 and results[-1]["peak_extra_bytes"] > 1.01 * results[1]["peak_extra_bytes"]:
            results[-1]["failed"] = "the peak grows with the ranks"
        if job.left < 90:
            break
    return results


def merges(job: Job) -> dict[str, Any]:
    """Seconds of one merge of a hop's whole out, in one kernel and in torch operations, and bytes a second."""
    s = job.sizes
    out, lse = torch.zeros(s.tokens, 1, s.h, s.e, device=job.device), torch.zeros(1, s.h, s.tokens, device=job.device)
    tile = torch.randn(s.tokens, 1, s.h, s.e, device=job.device).to(s.dtype)
    args = out.transpose(0, 1), lse, tile.transpose(0, 1), torch.randn_like(lse)
    moved = 2 * out.nbytes + tile.nbytes + 3 * lse.nbytes
    found = {}
    fused = _fused() if job.cuda else None
    for name, merge in {"triton": fused, "torch": _merge_}.items():
        if merge:
            times = []
            for _ in range(20):
                start = time.perf_counter()
                merge(*args)
                if job.cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            found[name] = {"min_s": min(times), "bytes": moved, "bytes_per_s": moved / min(times)}
    return found


ATTENTION = re.compile("sdpa|fmha|flash|cudnn|attention", re.IGNORECASE)


def launches(job: Job) -> dict[str, Any]:
    """CUDA kernels of a rank's hops beyond attention and messages, causal zigzag: at most 2 a hop forward, 3 backward.

    Kernels of one pass by name, those before the first hop counted in; `spans` are the profile's names for what hops do.
    """
    cp, rank = 4, 1
    plan = RingPlan.build(Mask.causal(cp * job.sizes.tokens), Layout.zigzag(cp * job.sizes.tokens, cp))
    q, k, v, dout = job.sizes.draw(job.sizes.tokens)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    transport, d, e = LoopbackTransport(rank, cp), job.sizes.d, job.sizes.e
    found: dict[str, Any] = {"kernel": choose("auto", device=q.device, dtype=q.dtype, d=d, e=e).name, "hops": cp}

    def forward() -> torch.Tensor:
        return ring_attention(q, k, v, transport, plan=plan, qkv_format="sbhd")

    out = forward()
    # Outside the hops: out, lse and the cast of out; dq, dk, dv, a hop's sums of dk and dv, and three casts.
    for name, limit, before, work in (
        ("forward", 2, 3, forward),
        ("backward", 3, 8, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)),
    ):
        work()
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * job.cuda
        with torch.profiler.profile(activities=activities) as profile:
            work()
            job.wait()
        events = profile.events()
        spans = sorted({x.name for x in events if x.name.startswith("cp_ring: ")})
        kernels = Counter(x.name for x in events if x.device_type == DeviceType.CUDA and not x.name.startswith("cp_ring: "))
        ours = {key: count for key, count in kernels.items() if not ATTENTION.search(key) and "Memcpy" not in key}
        found[name] = {"spans": spans, "kernels": dict(kernels), "beyond_attention": sum(ours.values())}
        # Half of a rank's own work makes one more hop in backward.
        allowed = before + limit * (cp + (name == "backward"))
        if sum(ours.values()) > allowed or not any("hop" in span for span in spans):
            found[name]["failed"] = f"more than {allowed} launches beyond attention, or no spans: {ours}"
    return found


def allocations(job: Job) -> dict[str, Any]:
    """After a warm-up no call asks the driver for memory, nor does one with more ranks allocate more often a hop."""
    found: dict[str, Any] = {}
    for cp in (4, 8):
        plan = RingPlan.build(Mask.causal(cp * job.sizes.tokens), Layout.zigzag(cp * job.sizes.tokens, cp))
        transport, (q, k, v, _) = LoopbackTransport(cp - 1, cp), job.sizes.draw(job.sizes.tokens)
        for _ in range(2):
            ring_attention(q, k, v, transport, plan=plan, qkv_format="sbhd")
        before = job.allocator()
        ring_attention(q, k, v, transport, plan=plan, qkv_format="sbhd")
        after = job.allocator()
        found[f"cp {cp}"] = {name: after[name] - before[name] for name in after}
        if after.get("segment.all.allocated", 0) > before.get("segment.all.allocated", 0):
            found["failed"] = f"cp {cp}: a warm call asked the driver for memory"
    return found


def peers(job: Job) -> list[dict[str, Any]] | dict[str, Any]:
    """`cp-ring bench attention` with every peer that is installed, where each rank has a device."""
    if not job.cuda:
        return contest(Contest(512, 2, 2, 16), ["cp_ring"], 1)
    cp = min(torch.cuda.device_count(), 8)
    if cp < 2:
        return {"skipped": "needs a CUDA device for each of two ranks"}
    names = [name for name, contestant in CONTESTANTS.items() if "cuda" in contestant.devices]
    return contest(Contest(cp * job.sizes.tokens, cp, job.sizes.h, job.sizes.d, "bfloat16", "cuda"), names, 5)


SECTIONS: dict[str, Callable[[Job], Any]] = {
    "kernels": kernels,
    "accuracy": accuracy,
    "rings": rings,
    "merges": merges,
    "launches": launches,
    "allocations": allocations,
    "memory": memory,
    "replays": replays,
    "peers": peers,
}


def _wrong(found: Any) -> bool:
    """Whether a section's result has a property that does not hold, or a ring that failed."""
    if isinstance(found, dict):
        broken = any(name in conformance.PROPERTIES and x != "holds" for name, x in found.items())
        return broken or "failed" in found or any(_wrong(x) for x in found.values())
    return isinstance(found, list) and any(_wrong(x) for x in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", default="results.json")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="A section; repeatable. Default: all.")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("tests.gpu.run: no CUDA device; --device cpu runs the script on small shapes", file=sys.stderr)
        return 2
    job, failed = Job(options.device), False
    report: dict[str, Any] = {"device": options.device, **facts()}
    if job.cuda:
        report |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for name in options.only or SECTIONS:
        start = time.monotonic()
        try:
            report[name] = SECTIONS[name](job) if job.left > 20 else {"skipped": "no time left"}
        except Exception:
            report[name], failed = {"failed": traceback.format_exc()[-3000:]}, True
        failed = failed or _wrong(report[name])
        report.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)
        Path(options.out).write_text(json.dumps(report, indent=1, default=str) + "\n")
        print(f"{name}: {report['seconds'][name]} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
