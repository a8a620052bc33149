"""Steps in which one device plays the ranks of a ring in turn, with their exact schedule, and
copies in place of messages.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import torch
from torch.autograd import DeviceType

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import choose
from cp_ring.plan.schedule import SLOT_SHARDS
from tests.gpu.job import Job
from tests.gpu.one_device import RankSizes, replay, single_call
from tests.loopback import LoopbackTransport

ATTENTION = re.compile("sdpa|fmha|flash|cudnn|attention", re.IGNORECASE)
COPIES = re.compile("Memcpy|Memset")


def causal_plan(
    cp: int, tokens: int, schedule: str = "auto", slot_shards: int = SLOT_SHARDS
) -> Plan:
    return Plan.build(
        Mask.causal(cp * tokens),
        Layout.zigzag(cp * tokens, cp),
        schedule=schedule,
        slot_shards=slot_shards,
    )


def profiles(job: Job) -> None:
    """Ranks 0, 3, 7 of cp 8: device time by kernel name, host time a hop, launches beyond
    attention; also 4 heads (tp 8).
    """
    plan = causal_plan(8, job.sizes.tokens)
    for h, g in ((job.sizes.h, job.sizes.g), (4, 1)):
        sizes = RankSizes(
            job.sizes.tokens, h, g, job.sizes.d, job.sizes.e, job.sizes.dtype, job.sizes.device
        )
        for rank in (0, 3, 7):
            _profile(job, plan, rank, sizes)


def _profile(job: Job, plan: Plan, rank: int, sizes: RankSizes) -> None:
    q, k, v, dout = sizes.draw(sizes.tokens)
    inputs, transport = [x.requires_grad_() for x in (q, k, v)], LoopbackTransport(rank, plan.cp)
    rank_plan = plan.rank_plan(rank)
    kernel = choose("auto", device=q.device, dtype=q.dtype, d=sizes.d, e=sizes.e).name

    def forward() -> torch.Tensor:
        return ring_attention(q, k, v, transport, plan=rank_plan, qkv_format="sbhd")

    out = forward()
    # Outside the hops: out, lse and the cast of out; dq, dk, dv, a hop's sums of dk and dv, and
    # three casts.
    works = {
        "forward": (2, 3, len(rank_plan.hops), forward),
        "backward": (
            3,
            8,
            len(rank_plan.backward),
            lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
        ),
    }
    for name, (limit, outside, hops, work) in works.items():
        work()
        work()
        job.wait()
        segments = _segments(job)
        start = time.perf_counter()
        work()
        host = time.perf_counter() - start
        job.wait()
        activities = [torch.profiler.ProfilerActivity.CPU] + [
            torch.profiler.ProfilerActivity.CUDA
        ] * job.cuda
        with torch.profiler.profile(activities=activities) as profile:
            work()
            job.wait()
        events = profile.events()
        spans = sorted({x.name for x in events if x.name.startswith("cp_ring: ")})
        times: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for event in events:
            mine = (
                event.device_type == DeviceType.CUDA
                if job.cuda
                else event.name.startswith("aten::")
            )
            if mine and not event.name.startswith("cp_ring: "):
                times[event.name] += (
                    event.self_device_time_total if job.cuda else event.self_cpu_time_total
                ) / 1e6
                counts[event.name] += 1
        where = {"pass": name, "rank": rank, "heads": f"{sizes.h}:{sizes.g}", "kernel": kernel}
        slowest = sorted(times, key=lambda key: -times[key])[:40]
        job.row(**where, hops=hops, host_us_a_hop=host / hops * 1e6, device_s={key: round(times[key], 7) for key in slowest},
                launches={key: counts[key] for key in slowest}, spans=spans)  # fmt: skip
        beyond = sum(
            n
            for key, n in counts.items()
            if job.cuda and not ATTENTION.search(key) and not COPIES.search(key)
        )
        job.check("launches beyond attention", beyond, outside + limit * hops, **where)
        job.check(
            "no spans of hops in the profile",
            float(not any("hop" in span for span in spans)),
            0,
            **where,
        )
        job.check(
            "memory asked of the driver by a warm call", _segments(job) - segments, 0, **where
        )


def _segments(job: Job) -> int:
    return int(torch.cuda.memory_stats().get("segment.all.allocated", 0)) if job.cuda else 0


def efficiencies(job: Job) -> None:
    """Efficiency of replays at cp 1 to 16 and each schedule, by the best kernel; the single call is
    timed before each rank.

    Then packed documents and a window at cp 8.
    """
    tokens, best = (
        job.sizes.tokens,
        choose("auto", device=job.device, dtype=job.sizes.dtype, d=job.sizes.d, e=job.sizes.e).name,
    )
    for cp in (1, 2, 4, 8, 16) if job.large else (2,):
        seen = set()
        for schedule in ("ring", "auto", "gather"):
            if schedule == "gather" and cp > 8:
                continue  # a slot would hold the keys of all other ranks
            plan = causal_plan(
                cp, tokens, schedule, slot_shards=cp if schedule == "gather" else SLOT_SHARDS
            )
            if tuple(plan.schedule) not in seen:
                seen.add(tuple(plan.schedule))
                ranks = range(cp) if cp <= 4 else sorted({0, cp // 2 - 1, cp - 1})
                _efficiency(job, plan, ranks, best, "causal", schedule)
    cp = 8 if job.large else 2
    n = cp * tokens
    # None of one token: that one would be a full tile, and a call of its own.
    documents = Mask.documents([n * x // 100 for x in (0, 3, 10, 12, 30, 33, 55, 80, 100)])
    plans = {"documents": Plan.build(documents, Layout.balanced(documents, cp))}
    window = Mask.causal(n, window=(n // 16, 0))
    plans["window"] = Plan.build(window, Layout.zigzag(n, cp))
    for name, plan in plans.items():
        _efficiency(job, plan, range(cp), "auto", name, "auto")


def _efficiency(job: Job, plan: Plan, ranks: Any, kernel: str, mask: str, schedule: str) -> None:
    """A rank's share of the work, at the speed of the single call, over its time; the slowest rank
    counts.
    """
    repeats = job.repeats if plan.cp <= 8 else 2
    work = plan.verify().work_per_rank
    results: list[dict[str, Any]] = []
    single = [single_call(plan.mask, job.sizes, repeats=1)["kernel"]]
    for rank in ranks:
        whole = single_call(plan.mask, job.sizes, repeats=max(repeats // 2, 1), names=single)
        mine = replay(plan, rank, job.sizes, kernel=kernel, repeats=repeats)
        share = float(work[rank] / work.sum())
        shares = {
            f"efficiency_{x[:-2]}": share * whole[x] / mine[x] for x in ("forward_s", "both_s")
        }
        results.append(
            {**mine, **shares, "single_kernel": whole["kernel"], "single_both_s": whole["both_s"]}
        )
        job.row(
            mask=mask,
            cp=plan.cp,
            schedule=schedule,
            hop_of_distance=list(plan.schedule),
            **results[-1],
        )
    least = {
        name: min(x[name] for x in results) for name in ("efficiency_forward", "efficiency_both")
    }
    job.row(
        mask=mask,
        cp=plan.cp,
        schedule=schedule,
        slowest_of=list(ranks),
        **least,
        what="single-GPU replay, no network",
    )


def memory(job: Job) -> None:
    """The peak of one forward and backward beyond q, k, v, out, lse, for more and more ranks of as
    many tokens: it stays.
    """
    kernel, peaks = "auto" if job.cuda else "cpu", {}  # emulations need memory of their own
    for cp in (2, 4, 8, 16, 32, 64) if job.large else (4, 16, 32):
        peaks[cp] = replay(
            causal_plan(cp, job.sizes.tokens), cp - 1, job.sizes, kernel=kernel, repeats=1
        )["peak_extra_bytes"]
        job.row(cp=cp, peak_extra_bytes=peaks[cp])
        # slots hold at most 4 shards, and two hops in succession fill theirs from cp 16 on
        if cp > 16:
            job.check("peak over that of cp 16", peaks[cp] / peaks[16], 1.01, cp=cp)


def million(job: Job) -> None:
    """Ranks 0, 31 and 63 of cp 64, causal over 1,048,576 tokens, 8 query and 2 key/value heads,
    against a call of 65,536.
    """
    cp, tokens, single = (64, 16384, 65536) if job.large else (16, 64, 256)
    sizes = RankSizes(
        tokens,
        8 if job.large else 4,
        2,
        job.sizes.d,
        job.sizes.e,
        job.sizes.dtype,
        job.sizes.device,
    )
    start = time.perf_counter()
    plan = causal_plan(cp, tokens)
    built = time.perf_counter()
    report = plan.verify()
    job.row(
        cp=cp,
        tokens=plan.n,
        build_s=built - start,
        verify_s=time.perf_counter() - built,
        schedule=list(plan.schedule),
    )
    names = [single_call(Mask.causal(single), sizes, repeats=1)["kernel"]]
    for rank in (0, cp // 2 - 1, cp - 1):
        whole = single_call(Mask.causal(single), sizes, repeats=job.repeats, names=names)
        mine = replay(plan, rank, sizes, repeats=min(job.repeats, 3))
        share = float(report.work_per_rank[rank]) / (single * (single + 1) / 2)
        efficiency = {
            f"efficiency_{x[:-2]}": share * whole[x] / mine[x] for x in ("forward_s", "both_s")
        }
        job.row(cp=cp, **mine, single_call=single, single_kernel=whole["kernel"], **efficiency)
