"""The records of a plan: what every rank computes and moves, for all ranks and for one.

A route fills `PlanTables`; the proof checks them; the executor runs one rank's `RankPlan`. The
records hold numbers and know nothing of the functions that make them, so that the proof
(`cp_ring.plan.proof`) can read them without any of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.mask import Mask
    from cp_ring.plan.moves import Moves
    from cp_ring.plan.tiles import Tiles

Ints = NDArray[np.int64]
OPEN = 1 << 60
"""The bound of a band's open side, and its negative on the left, as tiles and pieces have them."""


@dataclass(frozen=True, eq=False)
class Transfers:
    """Messages between ranks: tokens `[start, end)` of `owner`'s shard go from `sender` to
    `receiver`.

    All fields are int64 arrays of one length, one entry a message. `hop` is the hop whose key
    buffer at the receiver the keys fill, or whose gradient buffer at the sender the gradients
    leave. `buffer` is the hop of the buffer at the other end: the sender's key buffer, or the
    receiver's gradient buffer; 0 is the rank's own shard or its accumulators.
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
        return Transfers(*(getattr(self, name)[index] for name in self.__match_args__))

    @property
    def tokens(self) -> Ints:
        return self.end - self.start

    @cached_property
    def turned(self) -> Transfers:
        """The same messages, from their receivers to their senders."""
        return replace(self, sender=self.receiver, receiver=self.sender)


@dataclass(frozen=True, eq=False)
class PlanTables:
    """Tiles and transfers of all ranks. The members of a ring count as ranks here (see
    `cp_ring.plan.sizes.head_split`).

    layout: which rank holds which tokens.
    schedule: the hop of each distance: rank r works on keys of rank (r - d) mod cp at hop
    `schedule[d]`.
    tiles: queries counted in the rank's shard, keys in the source's shard; sorted by rank and hop.
    tile_rank, tile_hop, tile_source: int64 [tiles], the rank and hop that compute each tile, and
    the owner of its keys.
    transfers: messages of keys and values, sorted by receiver, hop, distance of the receiver from
    the owner, and start.
    gradients: messages of their gradients, sorted by sender, hop, distance of the sender from the
    owner, and start.
    part: the rank whose part alone the tables have: its tiles, the tiles that read its keys, and
    its messages. None if they have all.
    of_backward: the tables of backward, if it has another schedule; `gradients` are then there
    alone, and none are here.
    """

    mask: Mask
    layout: Layout
    route: str
    schedule: tuple[int, ...]
    tiles: Tiles
    tile_rank: Ints
    tile_hop: Ints
    tile_source: Ints
    transfers: Transfers
    gradients: Transfers
    part: int | None = None
    of_backward: PlanTables | None = None

    @property
    def backward(self) -> PlanTables:
        """The tables that backward runs."""
        return self.of_backward or self

    @property
    def cp(self) -> int:
        return self.layout.cp


@dataclass(frozen=True)
class Transfer:
    """Tokens `[start, end)` of a buffer, sent to or received from `peer`, one message for each
    range.

    `buffer` names the buffer: 0 is the rank's own shard, t > 0 the buffer of hop t. It is also 0
    for the buffer of the hop that the transfer belongs to.
    """

    peer: int
    ranges: tuple[tuple[int, int], ...]
    buffer: int = 0

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def packed(self, first: int = 0) -> Transfer:
        """Return the same messages laid end to end, from token `first` of another buffer."""
        cuts = list(accumulate((end - start for start, end in self.ranges), initial=first))
        return Transfer(self.peer, tuple(pairwise(cuts)), self.buffer)


@dataclass(frozen=True, eq=False)
class Hop:
    """The work and the messages of one rank at one hop.

    Keys: `receives` fill the `num_keys` tokens of this hop's key buffer, and `sends` leave at the
    same time. Both are posted before the previous hop is computed. At hop 0 the buffer is the
    rank's own shard, and nothing is received.

    Tiles: queries are tokens of the rank's shard; keys are tokens of this hop's key buffer.
    A tile may span the keys of several ranks.

    Gradients, backward only: key k of tile i belongs to token `k + grad_shift[i]` of this hop's
    gradient buffer of `num_grads` tokens. After the hop is computed, `grad_sends` leave from that
    buffer, and `grad_receives` are added to the rank's own accumulators (`buffer` 0) or to the
    gradient buffer of a later hop. Hops of forward alone have no such messages, and shifts of 0.
    """

    index: int
    tiles: Tiles
    num_keys: int
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    num_grads: int
    grad_shift: Ints
    grad_sends: tuple[Transfer, ...]
    grad_receives: tuple[Transfer, ...]

    @cached_property
    def num_arriving(self) -> int:
        """The number of tokens of `grad_receives`."""
        return sum(each.tokens for each in self.grad_receives)

    @cached_property
    def arrivals(self) -> tuple[tuple[Transfer, Transfer], ...]:
        """`grad_receives`, each with its messages in a buffer where all that arrive lie end to
        end.
        """
        starts = accumulate((each.tokens for each in self.grad_receives), initial=0)
        return tuple(
            (each, each.packed(start))
            for each, start in zip(self.grad_receives, starts, strict=False)
        )


class Fact(NamedTuple):
    """A fact that all ranks must agree on, such as a part of a plan's identity. `content` is
    compared, `words` are for the error message.
    """

    name: str
    content: str
    words: str

    @classmethod
    def of(cls, name: str, value: object) -> Fact:
        return cls(name, str(value), str(value))


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's hops, without those at which the rank neither computes nor moves anything.

    The hops are those of the rank's member of the ring, and count members as ranks: `num_tokens` is
    the size of the member's shard, `batch` the number of batch rows in it, `pieces` the number of
    pieces of the mask. `exchange` says how the tokens of the member's ranks come to all of them; it
    is None if the rank is its own member. `forwards` is True if some ranks pass on keys of others.
    `identity` identifies the whole plan (`cp_ring.plan.rank_plan`), so that ranks can check that
    they run the same one; () is not compared. `back` are the hops of backward, if these are others.
    """

    rank: int
    cp: int
    num_tokens: int
    hops: tuple[Hop, ...]
    batch: int = 1
    identity: tuple[Fact, ...] = ()
    pieces: int = 1
    exchange: Moves | None = None
    forwards: bool = False
    back: tuple[Hop, ...] | None = None

    @property
    def ulysses(self) -> int:
        """The number of ranks of the member."""
        return 1 if self.exchange is None else self.exchange.ranks

    @property
    def member(self) -> int:
        """The index of the rank's member in the ring."""
        return self.rank // self.ulysses

    @property
    def shard_tokens(self) -> int:
        """The number of tokens in the rank's own shard."""
        if (moves := self.exchange) is None:
            return self.num_tokens
        return int(moves.tokens[moves.sender == self.rank % moves.ranks].sum())

    @cached_property
    def backward(self) -> tuple[Hop, ...]:
        """The hops in the order of the backward pass: half of hop 0, the other hops, the other half
        of hop 0.

        The first remote keys travel during the first half, the last gradients during the second.
        """
        hops = self.back or self.hops
        if len(hops) < 2 or hops[0].index:
            return hops
        first, *others = hops
        start, end = (
            replace(first, tiles=t, grad_shift=first.grad_shift[which])
            for t, which in first.tiles.halves()
        )
        return (start, *others, end) if len(start.tiles) and len(end.tiles) else hops

    @cached_property
    def digest(self) -> str:
        """A string that is equal on all ranks that run the same plan."""
        return ";".join(f"{name}={content}" for name, content, _ in self.identity)

    @cached_property
    def packed(self) -> bool:
        """True if the mask has many pieces, as with packed documents."""
        return self.pieces > 4


class Turn(NamedTuple):
    """A hop in the order of a rank's messages (`cp_ring.plan.message_order`).

    slot: the slot in which its keys arrive; 0 if the hop reads the rank's own tokens.
    sends: its messages to other ranks, each with the slot that it is sent from.
    ahead: how many hops' messages are posted before this hop is computed.
    """

    hop: Hop
    slot: int
    sends: tuple[tuple[Transfer, int], ...]
    ahead: int


class Pairs(NamedTuple):
    """The pairs of a kernel call: sequences of queries, each with keys of its own.

    queries, keys: int64, the tokens of the rank's shard and of the hop's key buffer, in the order
    of the call.
    query_ends, key_ends: int64 [sequences + 1], where the sequences end in them, from 0 on.
    lo, hi: int64 [sequences], the band of each: query i and key j of a sequence are a pair if lo <=
    j - i <= hi.
    """

    queries: Ints
    keys: Ints
    query_ends: Ints
    key_ends: Ints
    lo: Ints
    hi: Ints


class Call(Protocol):
    """A kernel call, which knows its pairs."""

    def pairs(self) -> Pairs: ...


class Update(Protocol):
    """One pass over a total, which adds parts to it (`cp_ring.plan.updates`).

    table: int64 [4 + 2 * parts, segments], for each segment of the total's tokens
        start and end;
        1 if no earlier update has stored something there, else 0;
        1 if no later update will, else 0;
        and for each part the position of the segment's first token there, and the step from one
        token to the next: 1, -1 if the part has them in reverse order, or 0 if it has none of them.
        A segment without parts is filled with zeros, or is complete if something is stored there.
    whole: True if a kernel call's part is the whole total: nothing has to be computed, nor moved if
    its dtype is right. It is False for parts that arrive, because the next messages will overwrite
    their buffer.
    kept: the tokens of the total for which the running total has memory.
    """

    table: Ints
    whole: bool
    kept: slice
