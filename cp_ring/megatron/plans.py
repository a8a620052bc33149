"""The layout and the plan of a Megatron layer without documents, from the names in the settings.

A plan is verified when it is made, once per process, and shared by all layers. For documents see `documents`.
"""

from __future__ import annotations

import functools

from cp_ring.megatron.settings import LayerWindows, layer_windows
from cp_ring.plan.heads import HeadPlan, plan_of
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RingPlan

_MASKS = {"causal": Mask.causal, "no_mask": Mask.full}


def make_layout(name: str, n: int, cp: int) -> Layout:
    """The layout called `name` of `n` tokens over `cp` ranks; `balanced` balances the sum of the windows of all layers."""
    if name == "balanced":
        return _balanced(n, cp, layer_windows())
    return LAYOUTS[name](Mask.full(n), cp)


@functools.lru_cache(maxsize=16)
def _balanced(n: int, cp: int, windows: LayerWindows) -> Layout:
    return Layout.balanced([(Mask.causal(n, window), layers) for window, layers in windows], cp)


@functools.lru_cache(maxsize=64)
def make_plan(
    mask: str,
    n: int,
    cp: int,
    layout: str,
    route: str,
    window: tuple[int, int] = (-1, -1),
    schedule: str = "auto",
    slot_shards: int | None = None,
    heads: int = 1,
    node_size: int = 1,
) -> RingPlan | HeadPlan:
    """The verified plan of Megatron's mask type `causal` or `no_mask` over `n` tokens on `cp` ranks.

    window: the numbers of keys before and after its own position that a query sees; -1 is all.
    schedule, slot_shards: as in `RingPlan.build`.
    heads: neighboring ranks that exchange tokens for heads; node_size: neighboring ranks on one node.
    Raises `PlanError` if the mask, layout, route and schedule do not make a correct plan.
    """
    plan = plan_of(
        _MASKS[mask](n, window=window), make_layout(layout, n, cp), heads,
        route=route, schedule=schedule, slot_shards=slot_shards, node_size=node_size,
    )  # fmt: skip
    plan.verify()
    return plan
