"""Plans as data: masks, layouts, tiles, transfers, and the proof that they are right. No
torch.distributed here.

`cp_ring.plan.proof` has the proof, `cp_ring.plan.sizes` sizes of attention and rates of devices,
`cp_ring.plan.exchange` what moves beside the ring, `cp_ring.plan.costs` what plans cost and the
searches that read it.
"""

import warnings
from pathlib import Path
from typing import Any

from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import Capabilities, Lowered, lower
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.sizes.head_split import HeadSplit, split_heads
from cp_ring.plan.tables import Hop, RankPlan, Transfer
from cp_ring.plan.tiles import OPEN, Tile, Tiles

__all__ = [
    "OPEN",
    "Capabilities",
    "HeadSplit",
    "Hop",
    "Layout",
    "Lowered",
    "Mask",
    "Plan",
    "PlanSpec",
    "RankPlan",
    "Report",
    "Tile",
    "Tiles",
    "Transfer",
    "lower",
    "split_heads",
]


class _HeadPlan(Plan):
    @classmethod
    def build(  # type: ignore[override]
        cls, mask: Mask, layout: Layout, heads: int, **options: Any
    ) -> Plan:
        return Plan.build(mask, layout, ulysses=heads, **options)


_RENAMED = {
    "RingPlan": (Plan, "Plan"),
    "HeadPlan": (_HeadPlan, "Plan, and ulysses= for heads"),
}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module 'cp_ring.plan' has no attribute {name!r}")
    renamed, spelling = _RENAMED[name]
    package = str(Path(__file__).parents[1])
    warnings.warn(
        f"{name} has another name: write {spelling}",
        DeprecationWarning,
        skip_file_prefixes=(package,),
    )
    return renamed
