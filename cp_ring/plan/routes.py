"""Routes: how keys reach the ranks whose tiles read them, and how their gradients come home.

A route is one function from what every rank needs at every hop to two tables of transfers. A new one joins `ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cp_ring.plan.ranges import Ints, expand, overlaps, sort_index, union
from cp_ring.plan.tables import Need, Transfers


def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Each owner sends what a rank reads straight to that rank, at the hop that reads it; gradients go straight back."""
    home = np.zeros(len(need.rank), np.int64)
    keys = Transfers(need.hop, need.owner, need.rank, need.owner, need.start, need.end, home)
    return keys, replace(keys, sender=keys.receiver, receiver=keys.sender)


def ring(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Keys go from neighbor to neighbor as far as any rank downstream needs them; gradients go on along the ring, home.

    At hop t rank r holds keys of rank r - t. What it receives is what it, or a rank further on, needs; the gradient
    buffer that leaves it has what it, or a rank before it, needed.
    """
    owner, start, end, first, last = _reach(need)
    which, hop = expand(np.ones_like(last), last)
    at, low, high = union(owner[which] * cp + hop, start[which], end[which])
    owner_, hop = np.divmod(at, cp)
    keys = Transfers(hop, (owner_ + hop - 1) % cp, (owner_ + hop) % cp, owner_, low, high, hop - 1)
    which, hop = expand(first, cp - first)
    at, low, high = union(owner[which] * cp + hop, start[which], end[which])
    owner_, hop = np.divmod(at, cp)
    grads = Transfers(hop, (owner_ + hop) % cp, (owner_ + hop + 1) % cp, owner_, low, high, (hop + 1) % cp)
    return keys, grads


def _reach(need: Need) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Each owner's rows cut where needs begin or end: (owner, start, end, first hop that needs them, last hop)."""
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

LOCAL = frozenset({"direct"})
"""Routes that move only what the two ends of a transfer themselves need, so that a rank can plan its own row alone."""
