"""Routes: how keys reach the ranks whose tiles read them, and how their gradients reach the owners of the keys.

To add a route, write one function from what every rank reads at every hop (`Need`) and the number of ranks to two
tables of transfers, of keys and of gradients, and enter it in `ROUTES` under the name that users give:

    def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]: ...

    ROUTES["direct"] = direct

`need.schedule` maps ring distance to hop: a hop may have several sources.

Flags and settings take their choices from `ROUTES`, so the entry must be made before they are read. The tables may be in
any order. `verify.check_keys` and `verify.check_gradients` state what they must hold; every plan of the route must pass
`RingPlan.build(mask, layout, "name").verify(rank_plans=True)`, for which `cp_ring.testing` has masks and a ring to run on.

A route of which a rank can plan its own part alone may enter its name in `LOCAL` too. This only saves time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cp_ring.plan.ranges import Ints, sort_index, union
from cp_ring.plan.tables import Need, Transfers


def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Each owner sends keys straight to the rank that reads them, at the hop that reads them; gradients go straight back."""
    own_shard = np.zeros(len(need.rank), np.int64)
    keys = Transfers(need.hop, need.owner, need.rank, need.owner, need.start, need.end, own_shard)
    return keys, replace(keys, sender=keys.receiver, receiver=keys.sender)


def ring(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Keys go from hop to hop as far as any rank downstream needs them; gradients go on from hop to hop, home.

    With one source a hop, rank r holds keys of rank r - t at hop t, and all messages go to the next neighbor. With several,
    the rank at distance d from the owner receives keys from a rank that held them one hop before, at distance
    `before[d]`, and sends its gradient buffer to a rank that holds the same keys one hop later, at distance `after[d]`, or
    to the owner after the last hop. A rank receives what it, or a rank downstream, needs. The gradient buffer that it
    sends on holds what it, or a rank upstream, needed.
    """
    before, after = _neighbors(np.array(need.schedule))
    last = need.schedule[-1]
    hop, owner, distance, start, end = _passed_on(need, cp, range(last, 0, -1), before)
    keys = Transfers(hop, (owner + before[distance]) % cp, (owner + distance) % cp, owner, start, end, hop - 1)
    hop, owner, distance, start, end = _passed_on(need, cp, range(1, last + 1), after)
    onward = np.where(hop < last, hop + 1, 0)
    return keys, Transfers(hop, (owner + distance) % cp, (owner + after[distance]) % cp, owner, start, end, onward)


def _neighbors(schedule: Ints) -> tuple[Ints, Ints]:
    """For each ring distance, one of the distances a hop before it and one of those a hop after it (0 after the last hop).

    The distances of a hop are shared out evenly among those of the neighboring hop, in order.
    """
    count = np.append(np.bincount(schedule), 1)
    first = np.cumsum(count) - count
    place = np.arange(len(schedule)) - first[schedule]
    earlier, later = np.maximum(schedule - 1, 0), schedule + 1
    before = first[earlier] + place * count[earlier] // count[schedule]
    after = first[later] + place * count[later] // count[schedule]
    return before, after % len(schedule)


def _passed_on(need: Need, cp: int, hops: range, to: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """What is held where every rank passes on, to distance `to[d]` at the next of `hops`, what it needs and what it got.

    Returns (hop, owner, distance, start, end) of ranges of the owners' tokens.
    """
    sort = sort_index(need.hop)
    hop, start, end = need.hop[sort], need.start[sort], need.end[sort]
    group = (need.owner * cp + (need.rank - need.owner) % cp)[sort]
    passed = (np.zeros(0, np.int64),) * 3
    parts: list[tuple[Ints, ...]] = []
    for index in hops:
        here = slice(*np.searchsorted(hop, [index, index + 1]))
        mine = group[here], start[here], end[here]
        held, low, high = union(*(np.concatenate(both) for both in zip(mine, passed, strict=True)))
        owner, distance = np.divmod(held, cp)
        parts.append((np.full(len(held), index), owner, distance, low, high))
        passed = owner * cp + to[distance], low, high
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.zeros(0, np.int64)] * 5
    return tuple(columns)  # type: ignore[return-value]


ROUTES: dict[str, Callable[[Need, int], tuple[Transfers, Transfers]]] = {"direct": direct, "ring": ring}
"""Routes that flags and settings can name."""

LOCAL = {"direct"}
"""Routes whose transfers of a rank follow from the tiles of the rank and of those that read its keys.

`RingPlan.build_rank_plan` then plans for these alone. For other routes it plans for all ranks.
"""

ONE_SOURCE = {"ring"}
"""Routes for which the schedule `auto` has one source a hop: more would send keys past the next neighbor."""
