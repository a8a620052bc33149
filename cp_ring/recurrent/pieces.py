"""The pieces of a stream that ranks scan, and what ranks send so that states run through them.

A piece is a longest run of tokens of one document, or of one branch of a tree, that lie together on
one rank. Its recurrence is an affine map of the state: S_out = A S_in + B. A piece begins with the
last state of its parent, the piece before it in sequence, which may be on any rank; siblings in a
tree have one parent. A piece without a parent begins with the state 0.

The states before pieces follow by pointer jumping, in as many rounds as the logarithm of the
longest chain of pieces. Each piece with a parent holds an entry, the composed map of some of its
ancestors. At first this is the map of its parent. In each later round the piece takes the entry of
the oldest ancestor in its own entry, and composes the two, until the chain ends at a document's
first piece. Maps go only to ranks that compose them, each at most once a round and a rank. A
document on one rank sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.moves import Moves, places
from cp_ring.plan.ranges import Ints, integers, short


@dataclass(frozen=True, eq=False)
class Round:
    """What pieces take at a time.

    piece: the pieces that take a map, ascending.
    place: of each of them, the place of this map among those that arrive at its rank.
    moves: brings the maps. The source of round 0 is the maps of a rank's pieces with children, the
    source of later rounds the entries of its pieces with parents; both in ascending order.
    """

    piece: Ints
    place: Ints
    moves: Moves


@dataclass(frozen=True, eq=False)
class Halo:
    """The tokens before pieces, for a causal convolution.

    place: int64 [pieces, w - 1], where a piece's rank has the tokens before the piece in sequence,
    the nearest first: in its shard, or behind it among those that arrive; -1 where the document has
    begun.
    leaving: the tokens that other ranks need, ascending.
    moves: brings them, from the ones of each rank.
    """

    place: Ints
    leaving: Ints
    moves: Moves


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of the stream of `layout` in order; int64 arrays of one length.

    start, end: the tokens of each piece, [start, end).
    owner: the rank that holds it.
    parent: the number of the piece whose last state it begins with, or -1.
    """

    layout: Layout
    start: Ints
    end: Ints
    owner: Ints
    parent: Ints

    @classmethod
    def of(cls, layout: Layout, starts: object, before: object) -> Pieces:
        """Cut the stream.

        Args:
            starts: the tokens at which documents and branches begin, from 0 up.
            before: for each of them the token whose state it continues, or -1.

        Raises `PlanError` for starts outside of the stream, and for a token that is not before the
        branch that continues it.
        """
        starts = integers(starts, "starts")
        before = integers(before, "before")
        ordered = 0 < len(starts) == len(before) and (np.diff(starts) > 0).all()
        inside = ordered and starts[0] == 0 and starts[-1] < layout.n
        if not inside or (before < -1).any() or (before >= starts).any():
            raise PlanError(
                f"states that begin at {short(starts)} and continue those of {short(before)}, in a "
                f"stream of {layout.n} tokens: starts must ascend, and follow what they continue"
            )
        changes = layout.edges[:-1][np.diff(layout.owner, prepend=-1) != 0]
        start = np.unique(np.concatenate([changes, starts, before[before >= 0] + 1]))
        last = start - 1
        last[np.searchsorted(start, starts)] = before
        parent = np.where(last < 0, -1, np.searchsorted(start, last, "right") - 1)
        return cls(layout, start, np.append(start[1:], layout.n), places(layout, start)[0], parent)

    @cached_property
    def goes_on(self) -> Ints:
        """The pieces that have a parent."""
        return np.flatnonzero(self.parent >= 0)

    @cached_property
    def hands_on(self) -> Ints:
        """The pieces that have children."""
        return np.unique(self.parent[self.goes_on])

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds, in each of which every rank posts all of its messages at once."""
        piece = self.goes_on
        oldest = self.parent.copy()  # of the ancestors in each entry
        found = [self._round(piece, oldest[piece], self.hands_on)] if len(piece) else []
        while len(piece := piece[self.parent[oldest[piece]] >= 0]):
            found.append(self._round(piece, oldest[piece], self.goes_on))
            oldest[piece] = oldest[oldest[piece]]
        return tuple(found)

    def _round(self, piece: Ints, source: Ints, table: Ints) -> Round:
        """Return the round in which each piece takes the map of a piece `source`, of those in
        `table`.
        """
        owner = self.owner
        count = len(self.owner)
        pairs, which = np.unique(owner[piece] * count + source, return_inverse=True)
        receiver, source = np.divmod(pairs, count)
        target = _numbers(receiver)
        number = np.zeros(count, np.int64)
        number[table] = _numbers(owner[table])
        ends = owner[source], receiver, number[source], target
        moves = Moves.joined(self.layout.cp, *ends, np.ones_like(source))
        return Round(piece, target[which], moves)

    def halo(self, width: int) -> Halo:
        """Return the halo of a convolution over `width` tokens, the token itself among them."""
        owner = self.owner
        n = self.layout.n
        context = np.empty((len(owner), width - 1), np.int64)
        token = self.start
        for column in context.T:
            token = column[:] = self._before(token)
        holder, place = places(self.layout, np.maximum(context, 0))
        reader = np.broadcast_to(owner[:, None], context.shape)
        far = (context >= 0) & (holder != reader)
        pairs, which = np.unique(reader[far] * n + context[far], return_inverse=True)
        receiver, token = np.divmod(pairs, n)
        arrives = _numbers(receiver)
        leaving, source = np.unique(token, return_inverse=True)
        sender = places(self.layout, leaving)[0]
        place[far] = self.layout.tokens_per_rank[reader[far]] + arrives[which]
        place[context < 0] = -1
        source, sender = _numbers(sender)[source], sender[source]
        ends = sender, receiver, source, arrives
        moves = Moves.joined(self.layout.cp, *ends, np.ones_like(source))
        return Halo(place, leaving, moves)

    def _before(self, token: Ints) -> Ints:
        """Return the token before each token in sequence, or -1; before -1 it is -1 too."""
        piece = np.searchsorted(self.start, token, "right") - 1
        above = self.parent[piece]
        last = np.where(above < 0, -1, self.end[above] - 1)
        return np.where(token < 0, -1, np.where(token == self.start[piece], last, token - 1))


def _numbers(group: Ints) -> Ints:
    """Return the number of each entry among the entries of its group."""
    order = np.argsort(group, kind="stable")
    number = np.empty_like(group)
    number[order] = np.arange(len(group)) - np.searchsorted(group[order], group[order])
    return number
