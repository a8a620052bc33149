"""Plans kept and plans made ahead, because many microbatches share one and every new one takes time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ring_plan import RankPlan, RingPlan

MAX_PLANS = 64

_plans: OrderedDict[bytes, RingPlan] = OrderedDict()
_lock = Lock()


def plan_for(mask: Mask, layout: Layout, route: str = "direct") -> RingPlan:
    """`RingPlan.build`, or the plan of an equal mask, layout and route from before; the 64 last used are kept."""
    key = digest(mask, layout, route)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    plan = RingPlan.build(mask, layout, route)
    with _lock:
        _plans[key] = plan
        while len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    return plan


def digest(mask: Mask, layout: Layout, route: str) -> bytes:
    """Equal for equal masks, layouts and routes, whatever they are called."""
    state = hashlib.blake2b(f"{mask.n} {layout.n} {layout.cp} {len(layout.owner)} {route}".encode(), digest_size=16)
    for table in (layout.edges, layout.owner, mask.pieces.data):
        state.update(table.tobytes())
    return state.digest()


def rows_ahead(masks: Iterable[tuple[Mask, Layout]], rank: int, route: str = "direct") -> Iterator[RankPlan]:
    """One rank's row for each (mask, layout), where a worker thread makes the next one while this one is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="cp_ring-plan") as worker:
        ahead: Future[RankPlan] | None = None
        for mask, layout in masks:
            now, ahead = ahead, worker.submit(RingPlan.build_row, mask, layout, rank, route)
            if now is not None:
                yield now.result()
        if ahead is not None:
            yield ahead.result()
