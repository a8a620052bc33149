"""Makes the layout and the plan of a Megatron layer without documents, from their names.

A plan is shared by all layers. For documents see `documents`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cp_ring.megatron.adapter.config import EVERY_KEY, LayerWindows
from cp_ring.plan.layout import LAYOUTS, Layout, NamedLayout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec, plan
from cp_ring.runtime import RUNTIME

_MASKS = {"causal": Mask.causal, "no_mask": Mask.full}


def make_layout(name: str, n: int, cp: int, windows: LayerWindows = EVERY_KEY) -> Layout:
    """Return the layout called `name` of `n` tokens over `cp` ranks. A layout that weighs masks, as
    `balanced` does, balances the work of the `windows` of all layers together.
    """
    split = LAYOUTS[name]
    return _layout(split, n, cp, windows if split.weighs else ())


@RUNTIME.cache(maxsize=16)
def _layout(split: NamedLayout, n: int, cp: int, windows: LayerWindows) -> Layout:
    layers = [(Mask.causal(n, window), count) for window, count in windows]
    return split.make(layers or Mask.full(n), cp)


def layout_of_row(
    name: str,
    n: int,
    cp: int,
    mask_of: Callable[[tuple[int, int]], Mask],
    windows: LayerWindows = EVERY_KEY,
) -> Layout:
    """Return the layout called `name` for one batch row of `n` tokens; `mask_of` gives its mask for
    each window.
    """
    if cp == 1:
        return Layout.contiguous(n, 1)
    split = LAYOUTS[name]
    if not split.weighs:
        return make_layout(name, n, cp, windows)
    return split.of_layers([(mask_of(window), count) for window, count in windows], cp)


@RUNTIME.cache(maxsize=64)
def _mask(kind: str, n: int, window: tuple[int, int]) -> Mask:
    return _MASKS[kind](n, window=window)


def make_plan(
    mask: str,
    n: int,
    cp: int,
    window: tuple[int, int] = (-1, -1),
    spec: PlanSpec = PlanSpec(),
    windows: LayerWindows = EVERY_KEY,
) -> Plan:
    """Return the proven plan of Megatron's mask type `causal` or `no_mask` over `n` tokens on `cp`
    ranks.

    window: the numbers of keys before and after its own position that a query sees; -1 means all.
    spec: its layout must be a name, of a layout that may balance the `windows` of all layers.

    Raises `PlanError` if mask, layout, route and schedule do not make a correct plan.
    """
    layout = make_layout(str(spec.layout), n, cp, windows)
    return plan(_mask(mask, n, window), cp, replace(spec, layout=layout))
