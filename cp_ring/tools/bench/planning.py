"""`cp-ring bench plan`: the time to make and prove plans, the keys and values that they move, the
balance of their work.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.balance import balance
from cp_ring.plan.routes import DEFAULT
from cp_ring.tools.bench import samples


class Result(NamedTuple):
    """One measurement; `goal` is an upper limit, or 0 for none."""

    what: str
    measured: float
    unit: str
    goal: float


DRAWS = 20


def run(repeats: int) -> list[Result]:
    """All measurements; each time is the best of `repeats`."""
    return [*packed(repeats), *huge(repeats), *shares(), *balances()]


def packed(repeats: int) -> list[Result]:
    """1M tokens of 4,096 documents on 64 ranks."""
    n, cp = 1 << 20, 64
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, n), 4095, replace=False))
    mask = Mask.documents([0, *cuts.tolist(), n])
    layout = Layout.zigzag(n, cp)
    plan, build = best_time(lambda: Plan.build(mask, layout), repeats)
    _, verify = best_time(plan.verify, repeats)
    even, balanced = best_time(lambda: Layout.balanced(mask, cp), repeats)
    _, alone = best_time(lambda: Plan.build_rank_plan(mask, even, 5), repeats)
    what = "1M tokens, 4,096 documents, cp 64"
    return [
        Result(f"{what}: build", build, "ms", 5),
        Result(f"{what}: verify", verify, "ms", 10),
        Result(f"{what}: balanced layout", balanced, "ms", 10),
        Result(f"{what}: one rank's plan, balanced layout", alone, "ms", 2),
    ]


def huge(repeats: int) -> list[Result]:
    """16M causal tokens on 1,024 ranks: the plan of one rank, and the whole plan built and proven,
    on two routes.
    """
    mask = Mask.causal(1 << 24)
    layout = Layout.zigzag(1 << 24, 1024)
    _, alone = best_time(lambda: Plan.build_rank_plan(mask, layout, 500), repeats)
    _, whole = best_time(lambda: Plan.build(mask, layout).verify(), min(repeats, 3))
    _, relayed = best_time(
        lambda: Plan.build(mask, layout, "relay", node_size=8).verify(), min(repeats, 3)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    what = "16M causal tokens, cp 1,024"
    return [
        Result(f"{what}: one rank's plan", alone, "ms", 5),
        Result(f"{what}: all ranks, built and verified", whole / 1e3, "s", 3),
        Result(
            f"{what}, relay in nodes of 8: all ranks, built and verified", relayed / 1e3, "s", 5
        ),
        Result(f"{what}: peak memory of the process", peak, "GB", 2),
    ]


def shares() -> list[Result]:
    """Keys and values on the wire, as a share of those of a full ring."""
    n = 65536
    cases = [
        ("causal, cp 4", Mask.causal(n), Layout.zigzag(n, 4), 0.76),
        ("window 4,096, 64K tokens, cp 8", Mask.causal(n, (4096, 0)), Layout.zigzag(n, 8), 0.13),
    ]
    results = [
        Result(
            f"share of full ring, {name}, {route}",
            full_ring_share(mask, layout, route),
            "",
            goal if route == DEFAULT else 0.0,
        )
        for name, mask, layout, goal in cases
        for route in ("direct", "ring")
    ]
    masks = [Mask.documents(samples.exponential(n, 2000, seed)) for seed in range(DRAWS)]
    layouts = {
        "zigzag": (lambda mask: Layout.zigzag(n, 8), 0.10),
        "balanced": (lambda mask: Layout.balanced(mask, 8), 0.20),
    }
    for name, (make, goal) in layouts.items():
        for route in ("direct", "ring"):
            worst = max(full_ring_share(mask, make(mask), route) for mask in masks)
            what = (
                f"share of full ring, documents of 2,000 tokens, cp 8, {name}, {route}, worst of "
                f"{DRAWS}"
            )
            results.append(Result(what, worst, "", goal if route == DEFAULT else 0.0))
    return results


def balances() -> list[Result]:
    """Maximum / mean work of the balanced layout, and of zigzag for comparison."""
    n, cp = 65536, 8
    results: list[Result] = []
    for name, sample in (
        ("log-normal", samples.log_normal),
        ("one long, many short", samples.one_long),
    ):
        masks = [Mask.documents(sample(n, 1000, seed)) for seed in range(DRAWS)]
        worst = max(balance([(mask, 1)], Layout.balanced(mask, cp)) for mask in masks)
        plain = max(balance([(mask, 1)], Layout.zigzag(n, cp)) for mask in masks)
        results.append(
            Result(f"balance, {name} documents, cp 8, balanced, worst of {DRAWS}", worst, "", 1.05)
        )
        results.append(
            Result(f"balance, {name} documents, cp 8, zigzag, worst of {DRAWS}", plain, "", 0.0)
        )
    return results


def full_ring_share(mask: Mask, layout: Layout, route: str) -> float:
    return Plan.build(mask, layout, route).verify().share_of_full_ring


def best_time(make: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What `make` returns, and the best of `repeats` times in milliseconds. One call before them is
    not timed.
    """
    made = make()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        made = make()
        times.append((time.perf_counter() - start) * 1e3)
    return made, min(times)
