"""The time of a plan where messages wait for late peers: the formula takes the slowest rank's own
sum of stages, here a stage's messages begin when both of their ends are there.
"""

import numpy as np


def seconds(plan, given):
    """Seconds of forward and backward until the last rank is done."""
    time, ring = plan.time(given), plan.ring
    end = 0.0
    tables = ring, ring.of_backward or ring
    for of, each, lag in zip((time.there, time.back), tables, (1, 0), strict=True):
        hops, keys, compute, moving = of.hops, each.transfers, of.compute, of.moving
        meets = np.zeros((int(hops.max()) + 2, ring.cp, ring.cp), bool)
        meets[keys.hop, keys.sender, keys.receiver] = True
        meets[keys.hop, keys.receiver, keys.sender] = True
        meets |= np.eye(ring.cp, dtype=bool)
        begin = np.full(ring.cp, end)
        for stage in range(compute.shape[1]):
            # what moves while a rank computes a stage is for its next hop, or of its last one
            hop = hops[:, np.clip(stage + lag, 0, hops.shape[1] - 1)]
            both = np.where(meets[hop, np.arange(ring.cp)], begin, 0.0).max(1)
            moved = np.where(moving[:, stage] > 0, both + moving[:, stage], 0.0)
            begin = np.maximum(begin + compute[:, stage], moved)
        end = float(begin.max())
    return end + time.there.exchange + time.back.exchange
