"""`cp-ring bench overlap`: how much of the communication shows in the time of a step, on a link of a set speed.

Two ranks, each in a network namespace of its own, joined by a wire that is throttled so that a full shard of keys and
values takes a given share of the time that a hop's compute takes in forward. What a step of forward and backward takes
longer than on the unthrottled wire, over the latter, is exposed communication.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from cp_ring import Layout, Mask, RingPlan
from cp_ring.bench.attention import Contest, _prepare, _timed
from cp_ring.errors import ConfigError
from cp_ring.kernels import choose
from cp_ring.kernels.calls import kernel_calls
from cp_ring.testing.network import ThrottledLink
from cp_ring.testing.rank_pool import Ranks


def hop_seconds(group: Any, contest: Contest, repeats: int) -> float:
    """On a rank: compute of its hop 1 in forward, in seconds of its one thread: what else the machine does is not counted."""
    plan = RingPlan.build(Mask.causal(contest.n), Layout.zigzag(contest.n, contest.cp))
    hop = plan.rank_plan(group.rank()).hops[1]
    rows = contest.n // contest.cp
    q, k, v, out = (torch.randn(rows, 1, contest.heads, contest.head_dim) for _ in range(4))
    lse = torch.zeros(1, contest.heads, rows)
    kernel = choose("auto", device=q.device, dtype=q.dtype, d=contest.head_dim, e=contest.head_dim)
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        start = time.thread_time()
        for call in kernel_calls(hop, kernel.capabilities):
            call.merge_(out, lse, *call.attend(kernel, q, k, v, contest.head_dim**-0.5))
        times.append(time.thread_time() - start)
    return min(times[1:])


def transfer_seconds(group: Any, size: int) -> float:
    """On a rank: `size` bytes to the other rank and as many from it, with nothing else to do."""
    out, back = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    dist.barrier(group)
    start = time.perf_counter()
    ops = [dist.P2POp(dist.irecv, back, group=group, group_peer=1 - group.rank())]
    ops.append(dist.P2POp(dist.isend, out, group=group, group_peer=1 - group.rank()))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return time.perf_counter() - start


def run(contest: Contest, ratios: list[float], repeats: int) -> list[dict[str, Any]]:
    """Rows {name, ratio, median_s, min_s, max_s, exposed, hop_s, transfer_s, bytes_per_s}, the first of the free wire.

    Wires take turns, a step of each a round; a time is the slower rank's. Where this machine or user cannot make such
    a link, one row with the reason in `skipped`.
    """
    try:
        link = ThrottledLink()
    except ConfigError as error:
        return [{"name": "cp_ring", "skipped": str(error)}]
    ranks = Ranks(2, link.ends)
    try:
        return _measure(link, ranks, contest, ratios, repeats)
    finally:
        ranks.close()
        link.close()


def _measure(link: ThrottledLink, ranks: Ranks, contest: Contest, ratios: list[float], repeats: int) -> list[dict[str, Any]]:
    size = 2 * contest.n // 2 * contest.heads * contest.head_dim * 4
    hop = statistics.mean(ranks.run(hop_seconds, 2, contest, 3, timeout=600))
    ranks.run(_prepare, 2, "cp_ring", contest, timeout=600)
    rows: list[dict[str, Any]] = [{"name": "cp_ring_free_wire", "ratio": 0.0, "times": []}]
    rows += [{"name": "cp_ring", "ratio": ratio, "times": [], "bytes_per_s": size / (ratio * hop)} for ratio in ratios]
    for row in rows:
        link.throttle(row.get("bytes_per_s"))
        row |= {"hop_s": hop, "transfer_s": max(ranks.run(transfer_seconds, 2, size, timeout=600))}
    for _ in range(repeats):
        for row in rows:
            link.throttle(row.get("bytes_per_s"))
            row["times"].append(max(ranks.run(_timed, 2, "cp_ring", timeout=600)))
    for row in rows:
        row |= {"median_s": statistics.median(row["times"]), "min_s": min(row["times"]), "max_s": max(row["times"])}
        row["exposed"] = row["median_s"] / rows[0]["median_s"] - 1
    return rows
