"""Routes: how keys reach the ranks whose tiles read them, and how their gradients come home.

A route is one function from what every rank needs at every hop to two tables of transfers. A new one joins `ROUTES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, order, overlaps, spread, union


@dataclass(frozen=True, eq=False)
class Need:
    """Rows `[start, end)` of `owner`'s shard that `rank` reads at `hop`: int64 arrays, sorted by rank, hop and row."""

    rank: Ints
    hop: Ints
    owner: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, eq=False)
class Transfers:
    """Messages between ranks, one a column: rows `[start, end)` of `owner`'s shard go from `sender` to `receiver`.

    All are int64 arrays of one length. `hop` is when: keys fill the receiver's buffer of that hop, gradients leave the
    sender's. `buffer` is the other end: the hop of the sender's key buffer, or of the receiver's gradient buffer; 0 is
    the rank's own shard, or its own accumulators.
    """

    hop: Ints
    sender: Ints
    receiver: Ints
    owner: Ints
    start: Ints
    end: Ints
    buffer: Ints

    def __len__(self) -> int:
        return len(self.hop)

    def __getitem__(self, index: NDArray[np.generic] | slice) -> Transfers:
        return Transfers(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def tokens(self) -> Ints:
        return self.end - self.start

    def sorted_by(self, *names: str) -> Transfers:
        """Sorted by the named columns, the most significant first."""
        return self[order(*(getattr(self, name) for name in names))]

    def between(self, column: str, value: int) -> Transfers:
        """The rows with this value in the column by which the table is sorted first; a view."""
        return self[slice(*np.searchsorted(getattr(self, column), [value, value + 1]))]


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
    which, hop = spread(np.ones_like(last), last)
    at, low, high = union(owner[which] * cp + hop, start[which], end[which])
    owner_, hop = np.divmod(at, cp)
    keys = Transfers(hop, (owner_ + hop - 1) % cp, (owner_ + hop) % cp, owner_, low, high, hop - 1)
    which, hop = spread(first, cp - first)
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
    sort = order(cell, need.hop[which])
    cell, hop = cell[sort], need.hop[which][sort]
    begins = np.flatnonzero(np.diff(cell, prepend=-1))
    ends = np.append(begins[1:], len(cell))[: len(begins)] - 1
    owner, start = np.divmod(cuts[cell[begins]], span)
    return owner, start, start + cuts[cell[begins] + 1] - cuts[cell[begins]], hop[begins], hop[ends]


ROUTES: dict[str, Callable[[Need, int], tuple[Transfers, Transfers]]] = {"direct": direct, "ring": ring}

LOCAL = frozenset({"direct"})
"""Routes that move only what the two ends of a transfer themselves need, so that a rank can plan its own row alone."""
