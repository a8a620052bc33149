"""`cp-ring bench plan`: the time to make and prove plans, the keys and values that they move, the
balance of their work.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

import numpy as np

from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.balance import balance
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.routes import DEFAULT
from cp_ring.tools.bench import samples
from cp_ring.tools.job.speeds import timed


class Result(NamedTuple):
    """One measurement; `goal` is an upper limit, or 0 for none."""

    what: str
    measured: float
    unit: str
    goal: float


DRAWS = 20
ROUTES = "direct", "ring"


def run(repeats: int) -> list[Result]:
    """All measurements; each time is the best of `repeats`."""
    return [*packed(repeats), *huge(repeats), *shares(), *balances()]


def packed(repeats: int) -> list[Result]:
    """1M tokens of 4,096 documents on 64 ranks."""
    n, cp = 1 << 20, 64
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, n), 4095, replace=False))
    mask = Mask.documents([0, *cuts.tolist(), n])
    layout = Layout.zigzag(n, cp)
    plan, even = Plan.build(mask, layout), Layout.balanced(mask, cp)
    build, verify, balanced, alone = (
        1e3 * min(timed(work, repeats))
        for work in (
            lambda: Plan.build(mask, layout),
            plan.verify,
            lambda: Layout.balanced(mask, cp),
            lambda: Plan.build_rank_plan(mask, even, 5),
        )
    )
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
    few = min(repeats, 3)
    alone = 1e3 * min(timed(lambda: Plan.build_rank_plan(mask, layout, 500), repeats))
    whole = min(timed(lambda: Plan.build(mask, layout).verify(), few))
    relayed = min(timed(lambda: Plan.build(mask, layout, "relay", node_size=8).verify(), few))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    what = "16M causal tokens, cp 1,024"
    return [
        Result(f"{what}: one rank's plan", alone, "ms", 5),
        Result(f"{what}: all ranks, built and verified", whole, "s", 3),
        Result(f"{what}, relay in nodes of 8: all ranks, built and verified", relayed, "s", 5),
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
        _share(f"{name}, {route}", [(mask, layout)], route, goal)
        for name, mask, layout, goal in cases
        for route in ROUTES
    ]
    masks = [Mask.documents(samples.exponential(n, 2000, seed)) for seed in range(DRAWS)]
    for name, goal in (("zigzag", 0.10), ("balanced", 0.20)):
        split = [(mask, LAYOUTS[name](mask, 8)) for mask in masks]
        for route in ROUTES:
            what = f"documents of 2,000 tokens, cp 8, {name}, {route}, worst of {DRAWS}"
            results.append(_share(what, split, route, goal))
    return results


def _share(what: str, cases: list[tuple[Mask, Layout]], route: str, goal: float) -> Result:
    worst = max(
        Plan.build(mask, layout, route).verify().share_of_full_ring for mask, layout in cases
    )
    return Result(f"share of full ring, {what}", worst, "", goal if route == DEFAULT else 0.0)


def balances() -> list[Result]:
    """Maximum / mean work of the balanced layout, and of zigzag for comparison."""
    n, cp = 65536, 8
    results: list[Result] = []
    for name, sample in (
        ("log-normal", samples.log_normal),
        ("one long, many short", samples.one_long),
    ):
        masks = [Mask.documents(sample(n, 1000, seed)) for seed in range(DRAWS)]
        for layout, goal in (("balanced", 1.05), ("zigzag", 0.0)):
            worst = max(balance([(mask, 1)], LAYOUTS[layout](mask, cp)) for mask in masks)
            what = f"balance, {name} documents, cp {cp}, {layout}, worst of {DRAWS}"
            results.append(Result(what, worst, "", goal))
    return results
