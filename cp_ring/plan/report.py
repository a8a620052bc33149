"""The report of a plan: its work and its traffic by rank and hop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import PlanTables


@dataclass(frozen=True, eq=False)
class Report:
    """The work and the traffic of a proven plan. Arrays are int64 [cp, cp], rank by hop.

    work: (query, key) pairs computed.
    keys_in, keys_out: tokens whose keys and values a rank receives and sends in the forward pass,
    and again in backward.
    grads_in, grads_out: tokens whose gradients of keys and values a rank receives and sends in the
    backward pass, by the hops of backward.
    """

    n: int
    tokens_per_rank: Ints
    work: Ints
    keys_in: Ints
    keys_out: Ints
    grads_in: Ints
    grads_out: Ints

    @property
    def slots(self) -> int:
        """The number of receive buffers in use at once. Two are enough, of which one is read while
        the next one is filled; ranks that receive once need one.
        """
        return min(2, int((self.keys_in > 0).sum(1).max()))

    @property
    def work_per_rank(self) -> Ints:
        return self.work.sum(1)

    @property
    def balance(self) -> float:
        """The largest work of a rank over the mean; 1.0 is perfect."""
        total = int(self.work.sum())
        return int(self.work_per_rank.max()) * len(self.work) / total if total else 1.0

    @property
    def share_of_full_ring(self) -> float:
        """The keys that move, as a share of a ring in which every shard visits every rank."""
        return int(self.keys_in.sum()) / max((len(self.work) - 1) * self.n, 1)


def report(plan: PlanTables) -> Report:
    """Sum up the plan's tables by rank and hop; this proves nothing."""
    cp, keys, grads = plan.cp, plan.transfers, plan.backward.gradients

    tables = [
        np.bincount(rank * cp + hop, amount, cp * cp).astype(np.int64).reshape(cp, cp)
        for rank, hop, amount in (
            (plan.tile_rank, plan.tile_hop, plan.tiles.area()),
            (keys.receiver, keys.hop, keys.tokens),
            (keys.sender, keys.hop, keys.tokens),
            (grads.receiver, grads.hop, grads.tokens),
            (grads.sender, grads.hop, grads.tokens),
        )
    ]
    return Report(plan.layout.n, plan.layout.tokens_per_rank, *tables)
