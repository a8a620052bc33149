"""Plans as data: masks, layouts, tiles, transfers, and the proof that they are right. No torch.distributed here."""

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import Hop, RankPlan, RingPlan, Transfer
from cp_ring.plan.tiles import OPEN, Tile, Tiles

__all__ = ["OPEN", "Hop", "Layout", "Mask", "RankPlan", "RingPlan", "Tile", "Tiles", "Transfer"]
