"""Waves: how well kernel calls fill the processors of a device.

A call is a grid of blocks, one for each head and 128 queries, in backward for each query head and
128 keys. A processor works on a block from its beginning to its end, and the call lasts until the
last one ends, so a grid that is no multiple of the processors leaves some without work. The times
of `cp_ring.plan.costs.simulate` have `Rates.call` for it; here each block is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from cp_ring.plan.costs.simulate import sampled_ranks
from cp_ring.plan.lower import BLOCK, Capabilities, call_groups, lower
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.tables import RankPlan
from cp_ring.plan.tiles import OPEN, Tiles

PROCESSORS = 132
"""Streaming multiprocessors of an H100."""

BEGIN = 1
"""What a block needs before its first matrix product, in products of 128 x 128: an assumption."""


def filled(
    plan: Plan, sizes: AttentionSizes, kernel: Capabilities, processors: int = PROCESSORS
) -> dict[str, float]:
    """The share of the processors' time in which they compute allowed pairs, 0 to 1: of `forward`
    and of `backward` of the worst of some ranks, and of `one` causal forward call of as many pairs.
    """
    heads = sizes.batch * sizes.of_rank(plan.ulysses).heads
    ranks = [rank * plan.ulysses for rank in sampled_ranks(plan.ring.cp)]
    found = [_filled(plan.rank_plan(rank), heads, kernel, processors) for rank in ranks]
    return {name: min(of_rank[name] for of_rank in found) for name in found[0]}


def _filled(part: RankPlan, heads: int, kernel: Capabilities, processors: int) -> dict[str, float]:
    shares, pairs = {}, 0
    for name, hops in (("forward", part.hops), ("backward", part.backward)):
        calls = []
        for hop in hops:
            lowered = lower(hop.tiles, kernel)
            calls += [
                lowered.tiles[np.array(group)] for group in call_groups(lowered, kernel.varlen)
            ]
        pairs = sum(int(tiles.area().sum()) for tiles in calls)
        shares[name] = _share(calls, heads, name == "backward", processors)
    side = int((2 * pairs) ** 0.5)
    alone = Tiles.columns(0, np.array([side]), 0, side, hi=0)
    return shares | {"one": _share([alone], heads, False, processors)}


def _share(calls: Iterable[Tiles], heads: int, backward: bool, processors: int) -> float:
    work, time = 0.0, 0
    for tiles in calls:
        work += float(tiles.area().sum()) * heads / BLOCK**2
        time += _makespan(np.repeat(_products(tiles, backward), heads) + BEGIN, processors)
    return work / (time * processors) if time else 1.0


def _products(tiles: Tiles, backward: bool) -> Ints:
    """Matrix products of 128 x 128 of each block of a call."""
    found = []
    for q0, q1, k0, k1, lo, hi in tiles.data.T.tolist():
        if backward:  # a strip of keys sees queries: the band as they see it
            q0, q1, k0, k1, lo, hi = k0, k1, q0, q1, -hi, -lo
        first = np.arange(q0, q1, BLOCK)
        last = np.minimum(first + BLOCK, q1) - 1
        start = np.full_like(first, k0) if lo <= -OPEN else np.maximum(k0, first + lo)
        end = np.full_like(first, k1) if hi >= OPEN else np.minimum(k1, last + hi + 1)
        found.append(np.maximum(-(-(end - start) // BLOCK), 0))
    return np.concatenate(found)


def _makespan(durations: Ints, processors: int) -> int:
    """When the last block ends, where each goes to the processor that is free first, the longest
    blocks before the others.
    """
    free = [0] * processors
    for duration in np.sort(durations)[::-1].tolist():
        heapq.heapreplace(free, free[0] + duration)
    return max(free)
