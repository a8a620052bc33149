"""Routes: how keys reach the ranks whose tiles read them, and how their gradients reach the owners of the keys.

To add a route, write one function from what every rank reads at every hop (`Need`) and the number of ranks to two
tables of transfers, of keys and of gradients, and enter it in `ROUTES` under the name that users give:

    def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]: ...

    ROUTES["direct"] = direct

Flags and settings take their choices from `ROUTES`, so the entry must be made before they are read. The tables may be in
any order. `verify.check_keys` and `verify.check_gradients` state what they must hold; every plan of the route must pass
`RingPlan.build(mask, layout, "name").verify(rank_plans=True)`, for which `cp_ring.testing` has masks and a ring to run on.

A route of which a rank can plan its own part alone may enter its name in `LOCAL` too. This only saves time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cp_ring.plan.ranges import Ints, expand, overlaps, sort_index, union
from cp_ring.plan.tables import Need, Transfers


def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Each owner sends keys straight to the rank that reads them, at the hop that reads them; gradients go straight back."""
    own_shard = np.zeros(len(need.rank), np.int64)
    keys = Transfers(need.hop, need.owner, need.rank, need.owner, need.start, need.end, own_shard)
    return keys, replace(keys, sender=keys.receiver, receiver=keys.sender)


def ring(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Keys go from neighbor to neighbor as far as any rank downstream needs them; gradients go on along the ring, home.

    At hop t rank r holds keys of rank r - t. It receives what it, or a rank downstream, needs. The gradient buffer that it
    sends on holds what it, or a rank upstream, needed.
    """
    owner, start, end, first, last = _reach(need)
    which, hop = expand(np.ones_like(last), last)
    group, low, high = union(owner[which] * cp + hop, start[which], end[which])
    owner_, hop = np.divmod(group, cp)
    keys = Transfers(hop, (owner_ + hop - 1) % cp, (owner_ + hop) % cp, owner_, low, high, hop - 1)
    which, hop = expand(first, cp - first)
    group, low, high = union(owner[which] * cp + hop, start[which], end[which])
    owner_, hop = np.divmod(group, cp)
    grads = Transfers(hop, (owner_ + hop) % cp, (owner_ + hop + 1) % cp, owner_, low, high, (hop + 1) % cp)
    return keys, grads


def _reach(need: Need) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Each owner's tokens cut where needs begin or end: (owner, start, end, first hop that needs them, last hop)."""
    span = int(need.end.max(initial=0)) + 1
    low, high = need.owner * span + need.start, need.owner * span + need.end
    cuts = np.unique(np.concatenate([low, high]))
    which, cell = overlaps(low, high, cuts[:-1], cuts[1:])
    sort = sort_index(cell, need.hop[which])
    cell, hop = cell[sort], need.hop[which][sort]
    begins = np.flatnonzero(np.diff(cell, prepend=-1))
    ends = np.append(begins[1:], len(cell))[: len(begins)] - 1
    owner, start = np.divmod(cuts[cell[begins]], span)
    return owner, start, start + cuts[cell[begins] + 1] - cuts[cell[begins]], hop[begins], hop[ends]


ROUTES: dict[str, Callable[[Need, int], tuple[Transfers, Transfers]]] = {"direct": direct, "ring": ring}
"""Routes that flags and settings can name."""

LOCAL = {"direct"}
"""Routes whose transfers of a rank follow from the tiles of the rank and of those that read its keys.

`RingPlan.build_rank_plan` then plans for these alone. For other routes it plans for all ranks.
"""
