"""One rank's view of a plan: its hops, with rows counted in the buffers that the executor holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, overload

import numpy as np

from cp_ring.plan.ranges import Ints, order
from cp_ring.plan.routes import Transfers
from cp_ring.plan.tiles import Tiles, halfway

if TYPE_CHECKING:
    from cp_ring.plan.ring_plan import RingPlan


@dataclass(frozen=True)
class Transfer:
    """Rows `[start, end)` of a buffer, sent to or received from `peer`, one message for each range.

    `buffer` tells whose rows: 0 is the rank's own shard, t > 0 the buffer of hop t.
    """

    peer: int
    ranges: tuple[tuple[int, int], ...]
    buffer: int = 0

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def packed(self, first: int = 0) -> Transfer:
        """The same messages laid end to end from row `first` of another buffer."""
        cuts = list(accumulate((end - start for start, end in self.ranges), initial=first))
        return Transfer(self.peer, tuple(pairwise(cuts)), self.buffer)


@dataclass(frozen=True, eq=False)
class Hop:
    """What one rank does at one hop.

    Keys: `receive` fills the `num_keys` rows of this hop's key buffer (at hop 0 it is the rank's own shard, and nothing
    is received); `sends` leave at the same time. Both are posted before the hop before this one is computed.

    Tiles: rows of the rank's shard, columns of this hop's key buffer, which holds keys of rank `source` (-1 where the
    hop only sends).

    Gradients, backward only: column k of tile i belongs to row `k + grad_shift[i]` of this hop's gradient buffer of
    `num_grads` rows. Once computed, `grad_sends` leave from that buffer, and `grad_receives` are added to the rank's own
    accumulators (`buffer` 0) or to the gradient buffer of a later hop.
    """

    index: int
    source: int
    tiles: Tiles
    num_keys: int
    receive: Transfer | None
    sends: tuple[Transfer, ...]
    num_grads: int
    grad_shift: Ints
    grad_sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]


class Hops(Sequence[Hop]):
    """Hops that are made when first asked for: a rank among 1,024 has 1,024, and needs one at a time."""

    def __init__(self, make: Callable[[int], Hop], live: list[int]):
        self._make, self._live = make, live
        self._made: dict[int, Hop] = {}

    def __len__(self) -> int:
        return len(self._live)

    @overload
    def __getitem__(self, place: int) -> Hop: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Hop, ...]: ...
    def __getitem__(self, place: int | slice) -> Hop | tuple[Hop, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(len(self))[place])
        index = self._live[place]
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    def __reduce__(self) -> tuple[type, tuple[tuple[Hop, ...]]]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's hops, dead ones left out. `batch` is how many batch rows its `num_rows` tokens are of."""

    rank: int
    cp: int
    num_rows: int
    hops: Sequence[Hop]
    batch: int = 1

    @cached_property
    def backward(self) -> Sequence[Hop]:
        """The hops in the order of the backward pass: half the work on the rank's own keys is left for the end.

        The last hop's gradients travel while it is done, as the first hop's keys do during the other half.
        """
        if len(self.hops) < 2 or self.hops[0].index:
            return self.hops
        first, *others = self.hops
        start, rest = (replace(first, tiles=t, grad_shift=first.grad_shift[which]) for t, which in halfway(first.tiles))
        return (start, *others, rest) if len(start.tiles) and len(rest.tiles) else self.hops

    @property
    def packed(self) -> bool:
        """Many tiles of many sizes on the rank's own keys, as packed documents have."""
        return any(len(hop.tiles) > 4 for hop in self.hops[:1])

    @property
    def max_keys(self) -> int:
        """Rows of the largest key buffer that a hop receives."""
        return max((hop.num_keys for hop in self.hops if hop.receive), default=0)

    @property
    def max_grads(self) -> int:
        """Rows of the largest gradient buffer of a hop other than hop 0."""
        return max((hop.num_grads for hop in self.hops if hop.index), default=0)

    @property
    def max_grad_receives(self) -> int:
        """Rows of the most gradients that arrive at one hop."""
        return max((sum(t.tokens for t in hop.grad_receives) for hop in self.hops), default=0)


class _Packing:
    """Buffers in which ranges of a shard lie end to end, one buffer a hop; hop 0 is the whole shard."""

    def __init__(self, ranges: Transfers, num_rows: int, cp: int):
        self._hop, self._start, size = ranges.hop, ranges.start, ranges.tokens
        self._span = int(ranges.end.max(initial=0)) + 1
        before = np.cumsum(size) - size
        self._slide = before - before[np.searchsorted(self._hop, self._hop)] - self._start
        self.sizes = np.bincount(self._hop, size, cp).astype(np.int64)
        self.sizes[0] = num_rows

    def slide(self, hop: Ints, start: Ints) -> Ints:
        """What to add to a row of the shard to get its row of the hop's buffer."""
        if not len(self._hop):
            return np.zeros_like(hop)
        key = hop * self._span + np.minimum(start, self._span - 1)
        place = np.searchsorted(self._hop * self._span + self._start, key, "right") - 1
        return np.where(hop == 0, 0, self._slide[place])


def rank_plan(plan: RingPlan, rank: int) -> RankPlan:
    """The row of one rank, from the tables of the plan."""
    cp, num_rows = plan.cp, int(plan.layout.tokens_per_rank[rank])
    mine = slice(*np.searchsorted(plan.tile_rank, [rank, rank + 1]))
    tiles, tile_hop = plan.tiles[mine], plan.tile_hop[mine]
    arriving = plan.transfers.between("receiver", rank)
    leaving = plan.transfers_by_sender.between("sender", rank)
    grads_leaving = plan.gradients.between("sender", rank)
    grads_arriving = plan.gradients_by_receiver.between("receiver", rank)

    live = np.zeros(cp, bool)
    for hop in (tile_hop, arriving.hop, leaving.hop, grads_leaving.hop, grads_arriving.hop):
        live[hop] = True
    source = np.full(cp, -1)
    source[0] = rank
    source[tile_hop] = plan.tile_source[mine]
    for table in (arriving, grads_leaving):
        source[table.hop] = table.owner

    keys, grads = _Packing(arriving, num_rows, cp), _Packing(grads_leaving, num_rows, cp)
    key_slide = keys.slide(tile_hop, tiles.k0)
    grad_shift = grads.slide(tile_hop, tiles.k0) - key_slide
    tiles = tiles.shifted(0, key_slide)
    receives = _Messages(arriving, "sender", arriving.hop, keys)
    sends = _Messages(leaving, "receiver", leaving.buffer, keys)
    grad_sends = _Messages(grads_leaving, "receiver", grads_leaving.hop, grads)
    grad_receives = _Messages(grads_arriving, "sender", grads_arriving.buffer, grads)

    def make(index: int) -> Hop:
        here = slice(*np.searchsorted(tile_hop, [index, index + 1]))
        return Hop(
            index=index,
            source=int(source[index]),
            tiles=tiles[here],
            num_keys=int(keys.sizes[index]),
            receive=next(iter(receives.at(index)), None),
            sends=sends.at(index),
            num_grads=int(grads.sizes[index]),
            grad_shift=grad_shift[here],
            grad_sends=grad_sends.at(index),
            grad_receives=grad_receives.at(index),
        )

    return RankPlan(rank, cp, num_rows, Hops(make, np.flatnonzero(live).tolist()), plan.layout.rows)


class _Messages:
    """The messages of a table, in rows of the packed buffers numbered `buffer`."""

    def __init__(self, table: Transfers, peer: str, buffer: Ints, packing: _Packing):
        slide, peers = packing.slide(buffer, table.start), getattr(table, peer)
        # A buffer that is filled at its own hop goes without saying; only others are named.
        named = np.where(buffer == table.hop, 0, buffer)
        sort = order(table.hop, peers, named, table.start)
        self._hop = table.hop[sort]
        self._rows = np.stack([peers, named, table.start + slide, table.end + slide])[:, sort]

    def at(self, hop: int) -> tuple[Transfer, ...]:
        """Those of one hop, grouped by peer."""
        rows = self._rows[:, slice(*np.searchsorted(self._hop, [hop, hop + 1]))].T.tolist()
        groups = groupby(rows, key=lambda row: (row[0], row[1]))
        return tuple(Transfer(peer, tuple((row[2], row[3]) for row in part), named) for (peer, named), part in groups)
