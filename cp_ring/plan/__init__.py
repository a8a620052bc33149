"""Plans as data: masks, layouts, tiles, transfers, and the proof that they are right. No torch.distributed here."""

from cp_ring.plan.head_split import HeadSplit, split_heads
from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import Capabilities, Lowered, lower
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.tables import Hop, RankPlan, Transfer
from cp_ring.plan.tiles import OPEN, Tile, Tiles
from cp_ring.plan.verify import Report

__all__ = [
    "OPEN",
    "Capabilities",
    "HeadSplit",
    "Hop",
    "Layout",
    "Lowered",
    "Mask",
    "Plan",
    "RankPlan",
    "Report",
    "Tile",
    "Tiles",
    "Transfer",
    "lower",
    "split_heads",
]
