"""Different process groups, used by parallel threads of one process."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from cp_ring import Layout, Mask, Plan
from cp_ring.testing.oracle import Case, brute_force
from tests.rings import attend_to_shard, joined, off

CASES = [(Case.draw(64, seed=seed, dtype=torch.float64), Plan.build(Mask.causal(64, (window, 0)), Layout.zigzag(64, 2)))
         for seed, window in ((1, -1), (2, 9))]  # fmt: skip
TIMES = 10


def attend_in_threads(_):
    """Each thread calls attention many times in a group of its own, with a mask of its own."""
    groups = [dist.new_group([0, 1]) for _ in CASES]
    if dist.get_rank() > 1:
        return None

    def many(which):
        return [attend_to_shard(groups[which], *CASES[which]) for _ in range(TIMES)]

    with ThreadPoolExecutor(len(CASES)) as threads:
        return list(threads.map(many, range(len(CASES))))


def test_groups_of_parallel_threads_do_not_disturb_each_other(pool):
    results = pool.run(attend_in_threads, 4)[:2]
    for which, (case, plan) in enumerate(CASES):
        truth = brute_force(case, plan.mask.dense())
        for time in range(TIMES):
            results_of = [rank[which][time] for rank in results]
            assert off(joined(plan.layout, results_of), truth) < 1e-12
