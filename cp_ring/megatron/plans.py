"""The layouts and plans of Megatron's layers: made from settings, proven, and shared by all layers of a process."""

from __future__ import annotations

import functools

from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RingPlan

_MASKS = {"causal": Mask.causal, "no_mask": Mask.full}


def make_layout(name: str, n: int, cp: int) -> Layout:
    """The layout called `name` of `n` tokens over `cp` ranks."""
    return LAYOUTS[name](Mask.full(n), cp)


@functools.lru_cache(maxsize=64)
def make_plan(mask: str, n: int, cp: int, layout: str, route: str, window: tuple[int, int] = (-1, -1)) -> RingPlan:
    """The verified plan for mask kind `causal` or `no_mask` over `n` tokens; made once per process and shared by all layers.

    `window` is how many keys before and after its own position a query sees; -1 is any number.
    """
    plan = RingPlan.build(_MASKS[mask](n, window=window), make_layout(layout, n, cp), route=route)
    plan.verify()
    return plan
