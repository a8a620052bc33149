"""The time of a plan where messages wait for late peers: the formula takes the slowest rank's own
sum of stages, here a stage's messages begin when both of their ends are there.
"""

from __future__ import annotations

import numpy as np

from cp_ring.plan import Plan
from cp_ring.plan.time import Conditions


def seconds(plan: Plan, given: Conditions) -> float:
    """Seconds of forward and backward until the last rank is done."""
    time, ring = plan.time(given), plan.ring
    hops, keys = time.hops, ring.transfers
    meets = np.zeros((int(hops.max()) + 2, ring.cp, ring.cp), bool)
    meets[keys.hop, keys.sender, keys.receiver] = meets[keys.hop, keys.receiver, keys.sender] = True
    meets |= np.eye(ring.cp, dtype=bool)
    end = 0.0
    for compute, moving, lag in zip(time.compute, time.moving, (1, 0), strict=True):
        begin = np.full(ring.cp, end)
        for stage in range(compute.shape[1]):
            # what moves while a rank computes a stage is for its next hop, or of its last one
            hop = hops[:, np.clip(stage + lag, 0, hops.shape[1] - 1)]
            both = np.where(meets[hop, np.arange(ring.cp)], begin, 0.0).max(1)
            moved = np.where(moving[:, stage] > 0, both + moving[:, stage], 0.0)
            begin = np.maximum(begin + compute[:, stage], moved)
        end = float(begin.max())
    return end + sum(time.exchange)
