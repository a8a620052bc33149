"""Waves: how well kernel calls fill the processors of a device.

A call is a grid of blocks, one for each head and 128 queries, in backward for each query head and
128 keys. A processor works on a block from its beginning to its end, and the call lasts until the
last one ends, so a grid that is no multiple of the processors leaves some without work. On two
streams these go on with the blocks of the next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.lower import BLOCK
from cp_ring.plan.ranges import Ints, expand
from cp_ring.plan.tiles import OPEN, Tiles

BEGIN = 1
"""What a block needs before its first matrix product, in products of 128 x 128: an assumption."""

REFERENCE = 8192, 16
"""Queries and keys, and heads, of the call whose speed is `Rates.flops`: a full mask, forward."""

Grids = tuple[Sequence[Tiles], Sequence[Tiles]]
"""The tiles of each kernel call of a rank, in forward and in backward."""


def filled(
    ranks: Iterable[Grids], heads: int, processors: int, streams: tuple[int, int] = (1, 1)
) -> dict[str, float]:
    """The share of the processors' time in which they compute allowed pairs, 0 to 1: of `forward`
    and of `backward` of the worst of some ranks, and of `one` causal forward call of as many pairs.

    heads: those of each call, times the batch size.
    """
    least = {"forward": 1.0, "backward": 1.0, "one": 1.0}
    for grids in ranks:
        pairs = sum(int(tiles.area().sum()) for tiles in grids[0])
        side = max(round((2 * pairs) ** 0.5 / BLOCK), 1) * BLOCK
        calls = {"forward": grids[0], "backward": grids[1], "one": [square(side, 0)]}
        for name, tiles in calls.items():
            back = name == "backward"
            filled = share(tiles, heads, back, processors, streams=streams[back])
            least[name] = min(least[name], filled)
    return least


def square(side: int, hi: int = OPEN) -> Tiles:
    """As many queries as keys, causal where `hi` is 0."""
    return Tiles.columns(0, np.array([side]), 0, side, hi=hi)


def share(
    calls: Iterable[Tiles],
    heads: int,
    backward: bool = False,
    processors: int | None = None,
    least: float = 0.0,
    streams: int = 1,
) -> float:
    """Of the calls, on so many streams in turn, each of which ends at least the time of `least`
    products after the one before. Without `processors`: of one block after another, where no
    processor is ever without one.
    """
    work, blocks = 0.0, 0
    free, ends = np.zeros(processors or 0), deque([0.0] * streams, streams)
    for tiles in calls:
        work += float(tiles.area().sum()) * heads / BLOCK**2
        durations, counts = np.unique(_products(tiles, backward) + BEGIN, return_counts=True)
        counts *= heads
        blocks += int(durations @ counts)
        if processors is not None:
            np.maximum(free, ends[0], out=free)
            ends.append(max(_hand_out(durations, counts, free), ends[-1] + least))
    time = blocks if processors is None else processors * max(ends)
    return work / time if work else 1.0


def _products(tiles: Tiles, backward: bool) -> Ints:
    """Matrix products of 128 x 128 of each block of a call."""
    q0, q1, k0, k1, lo, hi = tiles.data
    if backward:  # a strip of keys sees queries: the band as they see it
        q0, q1, k0, k1, lo, hi = k0, k1, q0, q1, -hi, -lo
    count = -(-(q1 - q0) // BLOCK)
    of, number = expand(np.zeros_like(count), count)
    first = q0[of] + number * BLOCK
    last = np.minimum(first + BLOCK, q1[of]) - 1
    start, end = np.maximum(k0[of], first + lo[of]), np.minimum(k1[of], last + hi[of] + 1)
    return np.maximum(-(-(end - start) // BLOCK), 0)


def _hand_out(durations: Ints, counts: Ints, free: NDArray[np.float64]) -> float:
    """When the last block ends, where each goes to the processor that is free first, the longest
    blocks before the others. `durations` ascend; there are `counts` blocks of each. `free`, when
    each processor is free, is changed.
    """
    processors, end = len(free), 0.0
    for duration, left in zip(durations[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free.sort()
            # those that are free before the first of these blocks ends take one each
            wave = int(np.searchsorted(free, free[0] + duration))
            rounds = left // processors if wave == processors else 0
            wave = processors if rounds else min(wave, left)
            free[:wave] += duration * max(rounds, 1)
            left -= wave * max(rounds, 1)
            end = max(end, float(free[wave - 1]))
    return end
