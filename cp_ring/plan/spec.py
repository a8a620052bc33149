"""PlanSpec: how attention is split over ranks; and `plan`, which makes and proves the plan of a mask by it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from cp_ring.errors import PlanError
from cp_ring.plan.layout import LAYOUTS, Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanOptions
from cp_ring.plan.routes import DEFAULT, ROUTES
from cp_ring.plan.schedule import text
from cp_ring.plan.tables import RankPlan

MAX_PLANS = 64
"""How many plans are kept: those that were used last."""

_plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
_lock = Lock()


@dataclass(frozen=True)
class PlanSpec:
    """How attention is split over ranks.

    layout: which rank holds which tokens, a name in `LAYOUTS` or a `Layout`.
    route, schedule, ulysses, node_size, slot_shards: as in `Plan.build`.
    """

    layout: Layout | str = "zigzag"
    route: str = DEFAULT
    schedule: str | tuple[int, ...] = "auto"
    ulysses: int = 1
    node_size: int = 1
    slot_shards: int | None = None

    def build(self, mask: Mask, cp: int) -> Plan:
        """The plan of `mask` over `cp` ranks, neither proven nor kept. Raises `PlanError` as `plan` does."""
        return Plan.build(mask, self._layout(mask, cp), **self._options())

    def build_rank_plan(self, mask: Mask, cp: int, rank: int) -> RankPlan:
        """One rank's plan, neither proven nor kept, without planning for the others where the route allows it."""
        return Plan.build_rank_plan(mask, self._layout(mask, cp), rank, **self._options())

    def _layout(self, mask: Mask, cp: int) -> Layout:
        layout = LAYOUTS[self.layout](mask, cp) if isinstance(self.layout, str) else self.layout
        if layout.cp != cp:
            raise PlanError(f"layout is for {layout.cp} ranks, not for {cp}")
        return layout

    def _options(self) -> PlanOptions:
        return {"route": self.route, "schedule": self.schedule, "slot_shards": self.slot_shards, "node_size": self.node_size,
                "ulysses": self.ulysses}  # fmt: skip


def plan(mask: Mask, cp: int, spec: PlanSpec = PlanSpec()) -> Plan:
    """The plan of `mask` over `cp` ranks, proven; equal arguments give the plan of an earlier call.

    Raises `PlanError` where the arguments do not fit together.
    """
    if isinstance(spec.layout, str) and spec.layout not in LAYOUTS:
        raise PlanError(f"layout={spec.layout!r}: unknown; known are {', '.join(LAYOUTS)}")
    if spec.route not in ROUTES:
        raise PlanError(f"route={spec.route!r}: unknown; known are {', '.join(ROUTES)}")
    # The functions and routes, because others may have taken their names in the registries since.
    split = LAYOUTS[spec.layout] if isinstance(spec.layout, str) else spec.layout.digest
    names = spec.route, text(spec.schedule), spec.ulysses, spec.node_size, spec.slot_shards
    key = mask.digest, cp, split, ROUTES[spec.route], *names
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
        # Made under the lock: threads that ask for one plan at the same time share it.
        proven = spec.build(mask, cp)
        proven.verify()
        _plans[key] = proven
        while len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    return proven
