"""`cp-ring bench overlap`: how much time communication adds to attention, on a link of a set speed.

There are two ranks, each in a network namespace of its own. A throttled wire joins them. Its speed
is set so that a full shard of keys and values takes a given ratio of the time that one hop computes
in forward. The exposed communication is the time that forward and backward take longer than on the
free (unthrottled) wire, divided by their time on the free wire.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels import choose
from cp_ring.kernels.calls import kernel_calls
from cp_ring.testing.rank_pool import Ranks
from cp_ring.tools.bench.contestants import Contest, prepare_contestant
from cp_ring.tools.job.speeds import exchange, in_turn, throttled_link, timed


def hop_seconds(group: Any, contest: Contest, repeats: int) -> float:
    """On a rank: seconds that its hop 1 computes in forward. This is time of its one thread, so
    other processes do not count.
    """
    plan = Plan.build(Mask.causal(contest.n), Layout.zigzag(contest.n, contest.cp))
    hop = plan.rank_plan(group.rank()).hops[1]
    tokens = contest.n // contest.cp
    q, k, v = (torch.randn(tokens, 1, contest.heads, contest.head_dim) for _ in range(3))
    kernel = choose("auto", device=q.device, dtype=q.dtype, d=contest.head_dim, e=contest.head_dim)

    def compute() -> None:
        for call in kernel_calls(hop, kernel.capabilities):
            call.attend(kernel, q, k, v, contest.head_dim**-0.5)

    return min(timed(compute, repeats, group=group, clock=time.thread_time))


def transfer_seconds(group: Any, size: int) -> float:
    """On a rank: seconds to send `size` bytes to the other rank and to receive as many, without any
    compute.
    """
    other = 1 - group.rank()
    return exchange(torch.zeros(size, dtype=torch.uint8), other, other, group)


def run(contest: Contest, ratios: list[float], repeats: int) -> list[dict[str, Any]]:
    """Results {name, ratio, median_s, min_s, max_s, exposed, hop_s, transfer_s, bytes_per_s}; the
    first is of the free wire.

    Each round runs forward and backward once with each wire. A time is that of the slower rank.
    Raises `NoNamespacesError`.
    """
    with throttled_link() as (ranks, throttle):
        return _measure_wires(throttle, ranks, contest, ratios, repeats)


def _measure_wires(
    throttle: Callable[[float | None], None],
    ranks: Ranks,
    contest: Contest,
    ratios: list[float],
    repeats: int,
) -> list[dict[str, Any]]:
    size = 2 * contest.n // 2 * contest.heads * contest.head_dim * 4
    hop = statistics.mean(ranks.run(hop_seconds, 2, contest, 3))
    ranks.run(prepare_contestant, 2, "cp_ring", contest)
    results: list[dict[str, Any]] = [{"name": "cp_ring_free_wire", "ratio": 0.0}]
    results += [
        {"name": "cp_ring", "ratio": ratio, "bytes_per_s": size / (ratio * hop)} for ratio in ratios
    ]
    for result in results:
        throttle(result.get("bytes_per_s"))
        result |= {"hop_s": hop, "transfer_s": max(ranks.run(transfer_seconds, 2, size))}
    pools = dict.fromkeys(range(len(results)), (ranks, 2, "cp_ring"))
    measured = in_turn(pools, repeats, lambda number: throttle(results[number].get("bytes_per_s")))
    for number, result in enumerate(results):
        result |= measured[number]
        result["exposed"] = result["median_s"] / results[0]["median_s"] - 1
    return results
