"""Steps in which one device plays the ranks of a ring in turn, with their exact schedule, and
copies in place of messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels import choose
from cp_ring.plan.schedule import SLOT_SHARDS
from tests.gpu.job import Job
from tests.gpu.one_device import replay, single_call


def causal_plan(
    cp: int, tokens: int, schedule: str = "auto", slot_shards: int = SLOT_SHARDS
) -> Plan:
    return Plan.build(
        Mask.causal(cp * tokens),
        Layout.zigzag(cp * tokens, cp),
        schedule=schedule,
        slot_shards=slot_shards,
    )


def efficiencies(job: Job) -> None:
    """Efficiency of replays at cp 1 to 16 and each schedule, by the best kernel; the single call is
    timed before each rank.

    Then packed documents and a window at cp 8.
    """
    tokens, best = (
        job.sizes.tokens,
        choose("auto", device=job.device, dtype=job.sizes.dtype, d=job.sizes.d, e=job.sizes.e).name,
    )
    for cp in (1, 2, 4, 8, 16) if job.values else (2,):
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
    cp = 8 if job.values else 2
    n = cp * tokens
    # None of one token: that one would be a full tile, and a call of its own.
    documents = Mask.documents([n * x // 100 for x in (0, 3, 10, 12, 30, 33, 55, 80, 100)])
    plans = {"documents": Plan.build(documents, Layout.balanced(documents, cp))}
    window = Mask.causal(n, window=(n // 16, 0))
    plans["window"] = Plan.build(window, Layout.zigzag(n, cp))
    for name, plan in plans.items():
        _efficiency(job, plan, range(cp), "auto", name, "auto")


def _efficiency(
    job: Job, plan: Plan, ranks: Iterable[int], kernel: str, mask: str, schedule: str
) -> None:
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
    peaks = {}
    for cp in (2, 4, 8, 16, 32, 64) if job.values else (4, 16, 32):
        peaks[cp] = replay(causal_plan(cp, job.sizes.tokens), cp - 1, job.sizes, repeats=1)[
            "peak_extra_bytes"
        ]
        job.row(cp=cp, peak_extra_bytes=peaks[cp])
        # slots hold at most 4 shards, and two hops in succession fill theirs from cp 16 on
        if cp > 16:
            job.check("peak over that of cp 16", peaks[cp] / peaks[16], 1.01, cp=cp)
