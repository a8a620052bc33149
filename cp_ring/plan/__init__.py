"""Plans as data: masks, layouts, tiles, transfers, and the proof that they are right. No
torch.distributed here.

`cp_ring.plan.proof` has the proof, `cp_ring.plan.sizes` sizes of attention and rates of devices,
`cp_ring.plan.moves` what moves beside the ring, `cp_ring.plan.time` how long plans take.
"""

from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import Capabilities, lower
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.records import RankPlan, Transfer
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.tiles import OPEN, Tile, Tiles

__all__ = [
    "OPEN",
    "Capabilities",
    "Layout",
    "Mask",
    "Plan",
    "PlanSpec",
    "RankPlan",
    "Tile",
    "Tiles",
    "Transfer",
    "lower",
    "split_heads",
]
