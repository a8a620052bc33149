"""The tables of a plan: what every rank needs, computes and moves, for all ranks and for one.

Everything else of the plan reads or makes these: routes turn `Need` into `Transfers`, `RingPlan` is a `PlanTables`, the
proof judges it, and the executor runs one rank's `RankPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, sort_index
from cp_ring.plan.tiles import Tiles, split_in_half


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
        return self[sort_index(*(getattr(self, name) for name in names))]

    def between(self, column: str, value: int) -> Transfers:
        """The rows with this value in the column by which the table is sorted first; a view."""
        return self[slice(*np.searchsorted(getattr(self, column), [value, value + 1]))]


@dataclass(frozen=True, eq=False)
class PlanTables:
    """Tiles and transfers of all ranks.

    tiles: queries counted in the rank's shard, keys in the source's shard; `tile_rank`, `tile_hop`, `tile_source`
    int64 [tiles]; sorted by rank and hop.
    transfers: keys, sorted by receiver, hop and start. gradients: sorted by sender, hop and start.
    """

    mask: Mask
    layout: Layout
    route: str
    tiles: Tiles
    tile_rank: Ints
    tile_hop: Ints
    tile_source: Ints
    transfers: Transfers
    gradients: Transfers

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def n(self) -> int:
        return self.layout.n

    @cached_property
    def transfers_by_sender(self) -> Transfers:
        return self.transfers.sorted_by("sender")

    @cached_property
    def gradients_by_receiver(self) -> Transfers:
        return self.gradients.sorted_by("receiver")


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
    """One rank's hops, dead ones left out. `batch` is how many batch rows its `num_tokens` tokens are of."""

    rank: int
    cp: int
    num_tokens: int
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
        start, rest = (replace(first, tiles=t, grad_shift=first.grad_shift[which]) for t, which in split_in_half(first.tiles))
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
