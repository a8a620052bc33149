"""Pairs of queries and keys as kernels compute them: in square blocks, beside the edges of a mask too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.tables import PlanTables
from cp_ring.plan.tiles import OPEN, Tiles


def blocked_pairs(plan: PlanTables, block: int, padded: bool = True) -> NDArray[np.float64]:
    """Pairs in the blocks of each rank's tiles at each hop, [cp, cp].

    padded: whether a block at the end of a tile counts whole, so that a tile of 4 tokens costs a block.
    """
    tiles, place = plan.tiles, plan.tile_rank * plan.cp + plan.tile_hop
    slide = tiles.k0 - tiles.q0
    q, k = -(-(tiles.q1 - tiles.q0) // block), -(-(tiles.k1 - tiles.k0) // block)
    low = np.where(tiles.lo == -OPEN, -OPEN, -((slide + block - 1 - tiles.lo) // block))
    high = np.where(tiles.hi == OPEN, OPEN, (tiles.hi - slide + block - 1) // block)
    none = np.zeros_like(q)
    area = Tiles(np.stack([none, q, none, k, low, high])).fitted().area() * block * block
    if not padded:
        area = np.minimum(area, (tiles.q1 - tiles.q0) * (tiles.k1 - tiles.k0))
    return np.bincount(place, area, plan.cp * plan.cp).reshape(plan.cp, plan.cp)
