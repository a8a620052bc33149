"""`plan`: the one maker of proven plans, which it keeps."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.schedule import text
from cp_ring.runtime import RUNTIME

MAX_PLANS = 64
"""How many plans are kept: those that were used last."""

_plans: OrderedDict[tuple[object, ...], Plan] = RUNTIME.keep(OrderedDict())
_lock = Lock()


def plan(mask: Mask, cp: int, spec: PlanSpec = PlanSpec()) -> Plan:
    """The plan of `mask` over `cp` ranks, proven; equal arguments give the plan of an earlier call.

    Raises `PlanError` where the arguments do not fit together.
    """
    # The functions and routes, because others may have taken their names in the registries since.
    split = LAYOUTS.get(spec.layout) if isinstance(spec.layout, str) else spec.layout.digest
    names = spec.route, text(spec.schedule), spec.ulysses, spec.node_size, spec.slot_shards
    key = mask.digest, cp, split, ROUTES.get(spec.route), *names
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
