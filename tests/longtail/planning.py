"""python -m tests.longtail.planning: what planning a row of long-tailed documents costs a worker of
the data loader, and the training process when the plan arrives; least of draws, in milliseconds.
"""

import pickle
import time

import numpy as np

from cp_ring.plan import Layout, Mask, PlanSpec
from cp_ring.plan.time import Conditions
from tests.longtail.shapes import RANK_TOKENS, SHAPES

DRAWS = 5


def costs(cp, seed):
    """Of a row over `cp` ranks: the ms for its layout, its heads, the proven plan of a rank, and
    unpickling, and the bytes that travel.
    """
    n = cp * RANK_TOKENS
    lengths = SHAPES["fine-tuning"].documents(seed, n)
    mask = Mask.documents(np.concatenate([[0], np.cumsum(lengths), [n]]))
    clock = [time.perf_counter()]

    def ms():
        clock.append(time.perf_counter())
        return (clock[-1] - clock[-2]) * 1e3

    layout = Layout.balanced(mask, cp)
    of_layout = ms()
    chosen = PlanSpec(layout, choice=Conditions()).build(mask, cp)
    spec = PlanSpec(layout, ulysses=chosen.ulysses)
    of_heads = ms()
    plan = spec.build_rank_plan(mask, cp, cp // 3)
    of_plan = ms()
    sent = pickle.dumps((layout, plan))
    ms()
    pickle.loads(sent)
    return of_layout, of_heads, of_plan, ms(), len(sent)


def main():
    print("| ranks | layout | heads | plan and proof | together | arrival | bytes |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for cp in (64, 256, 512):
        table = np.array([costs(cp, seed) for seed in range(DRAWS + 1)])[1:]  # pages memory first
        layout, heads, plan, arrival, sent = table.min(0)
        together = table[:, :3].sum(1).min()
        print(
            f"| {cp} | {layout:.0f} | {heads:.0f} | {plan:.0f} | {together:.0f} | {arrival:.2f} | "
            f"{sent:,.0f} |"
        )


if __name__ == "__main__":
    main()
