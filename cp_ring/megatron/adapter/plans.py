"""Makes the layout and the plan of a Megatron layer without documents, from their names.

A plan is shared by all layers. For documents see `documents`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cp_ring.megatron.adapter.config import Split
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec, plan
from cp_ring.runtime import RUNTIME

_MASKS = {"causal": Mask.causal, "no_mask": Mask.full}


def layout_of(
    split: Split, n: int, cp: int, mask_of: Callable[[tuple[int, int]], Mask] | None = None
) -> Layout:
    """Return the layout of a stream of `n` tokens over `cp` ranks.

    A layout that weighs masks, as `balanced` does, balances those of all layers together: `mask_of`
    gives the mask for each window; by default it is causal.
    """
    named = LAYOUTS[split.layout]
    if mask_of is None or not named.weighs:
        return _of_rows(split, n, cp)
    return named.of_layers([(mask_of(window), count) for window, count in split.windows], cp)


@RUNTIME.cache(maxsize=16)
def _of_rows(split: Split, n: int, cp: int) -> Layout:
    layers = [(Mask.causal(n, window), count) for window, count in split.windows]
    return LAYOUTS[split.layout].of_layers(layers, cp)


@RUNTIME.cache(maxsize=64)
def make_plan(
    mask: str,
    n: int,
    cp: int,
    window: tuple[int, int] = (-1, -1),
    spec: PlanSpec = PlanSpec(),
    split: Split = Split(),
) -> Plan:
    """Return the proven plan of Megatron's mask type `causal` or `no_mask` over `n` tokens on `cp`
    ranks.

    window: the numbers of keys before and after its own position that a query sees; -1 means all.

    Raises `PlanError` if mask, layout, route and schedule do not make a correct plan.
    """
    spec = replace(spec, layout=layout_of(split, n, cp))
    return plan(_MASKS[mask](n, window=window), cp, spec)
