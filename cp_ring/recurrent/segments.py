"""The segments of the stream that ranks hold, and what ranks exchange so that the state of a
recurrent layer runs through them.

The consecutive tokens of a rank are cut where the state begins anew. A segment then begins anew, or
goes on with the state that the segment before it hands on. A causal convolution needs the last
tokens before the segment besides, its halo. The bytes depend on neither the tokens nor the
documents, but on the borders of ranks that lie inside of documents.

Each segment's map, by which a state before it becomes one after it, goes to all ranks that hold
later segments of its document, at once: one gather. In backward, so do the gradients of the states,
to all ranks that hold earlier segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, integers, starts_in_groups, starts_of


@dataclass(frozen=True, eq=False)
class Swap:
    """What one rank sends and gets at a time.

    Attributes:
        source: which of those that it holds leave, in the order of the ranks that get them.
        leaving: how many go to each rank, int64 [cp].
        target: where those that arrive belong, in the order of the ranks that send them.
        arriving: how many come from each rank, int64 [cp].
    """

    source: Ints
    leaving: Ints
    target: Ints
    arriving: Ints


@dataclass(frozen=True, eq=False)
class Halo:
    """The tokens before its segments that a rank gets; they lie behind its own.

    Attributes:
        swap: of tokens of the shards to places in the halo.
        order: of each segment, its halo and its tokens: places in shard and halo, int64.
        offsets: where segments begin in this order, and its end.
        own: where the tokens of the shard are in this order.
    """

    swap: Swap
    order: Ints
    offsets: Ints
    own: Ints


@dataclass(frozen=True, eq=False)
class Held:
    """The segments of one rank.

    Attributes:
        offsets: where they begin in its shard, and its end: int64 [segments + 1].
        goes_on: those that go on with the state of another one, ascending.
        hands_on: those that hand one on, ascending.
    """

    offsets: Ints
    goes_on: Ints
    hands_on: Ints


@dataclass(frozen=True, eq=False)
class Gather:
    """How the maps of segments, or the gradients of states with the maps that they pass, come to a
    rank at once.

    Attributes:
        swap: from places in `hands_on` (gradients: `goes_on`) to entries of a table of maps.
        walk: at step i, the entries whose map follows that of another entry, and these entries.
        ends: of each segment in `goes_on` (gradients: `hands_on`), the entry that it follows.
    """

    swap: Swap
    walk: tuple[tuple[Ints, Ints], ...]
    ends: Ints


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of the stream of `layout`, in order.

    Attributes:
        starts: tokens at which the state begins anew, ascending, 0 among them.
        edges: where segments begin, and the end of the stream: int64 [segments + 1].
        owner: the rank that holds each: int64 [segments].
    """

    layout: Layout
    starts: Ints
    edges: Ints
    owner: Ints

    @classmethod
    def build(cls, layout: Layout, starts: Ints) -> Segments:
        """`starts`: 0 may be missing. Raises `PlanError` for one outside of the stream."""
        starts = np.union1d(integers(starts, "starts"), 0)
        if starts[0] < 0 or starts[-1] >= layout.n:
            raise PlanError(f"a state that begins at {starts[[0, -1]]} of {layout.n} tokens")
        changes = layout.edges[:-1][np.diff(layout.owner, prepend=-1) != 0]
        first = np.union1d(changes, starts)
        owner = layout.owner[np.searchsorted(layout.edges, first, "right") - 1]
        return cls(layout, starts, np.append(first, layout.n), owner)

    @cached_property
    def _begun(self) -> Ints:
        """Of each segment, the one in which its state began: int64 [segments]."""
        number = np.arange(len(self.owner))
        return np.maximum.accumulate(np.where(np.isin(self.edges[:-1], self.starts), number, 0))

    @property
    def _linked(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which segments go on, and which hand on: bool [segments]."""
        goes = self._begun < np.arange(len(self.owner))
        return goes, np.append(goes[1:], False)

    def held(self, rank: int) -> Held:
        mine = self.owner == rank
        size = np.diff(self.edges)[mine]
        goes, hands = (np.flatnonzero(each[mine]) for each in self._linked)
        return Held(np.append(starts_of(size), size.sum()), goes, hands)

    def _gathered(self, back: bool) -> tuple[Ints, Ints]:
        """(rank, segment) of each map that a rank needs, its own among them, ascending. back: of
        the gradients of states.
        """
        goes, hands = self._linked
        number, begun = np.arange(len(self.owner)), self._begun
        wants, gives = (hands, goes) if back else (goes, hands)
        # the last segment (back: the first one) that wants a state, of each rank and document
        edge = np.full((self.layout.cp, len(number)), len(number) if back else -1)
        place = self.owner[wants], begun[wants]
        (np.minimum if back else np.maximum).at(edge, place, number[wants])
        far = edge[:, begun]
        ranks, segments = np.nonzero(gives & ((number > far) if back else (number < far)))
        return ranks, segments

    def gather(self, rank: int, back: bool = False) -> Gather:
        """In backward (`back`), the gradients of states pass from the last segment to the first."""
        goes, hands = self._linked
        wants, gives = (hands, goes) if back else (goes, hands)
        places = starts_in_groups(gives.astype(np.int64), self.owner, self.layout.cp)
        ranks, segments = self._gathered(back)
        entry = starts_in_groups(np.ones(len(ranks), np.int64), ranks, self.layout.cp)
        swap = self._swap(rank, self.owner[segments], ranks, places[segments], entry)
        mine = segments[ranks == rank]
        follows, next_to = (hands[mine], 1) if back else (goes[mine], -1)
        walk, order = [], (mine - self._begun[mine])
        for depth in sorted(set(order[follows].tolist()), reverse=back):
            entries = np.flatnonzero(follows & (order == depth))
            walk.append((entries, entries + next_to))
        wanted = np.flatnonzero(wants & (self.owner == rank)) + next_to
        return Gather(swap, tuple(walk), np.searchsorted(mine, wanted))

    def halo(self, rank: int, width: int) -> Halo:
        """For a convolution over `width` tokens, its own among them."""
        edges, owner, size = self.edges, self.owner, np.diff(self.edges)
        count = np.minimum(edges[:-1] - edges[self._begun], width - 1)
        to, tokens = expand(edges[:-1] - count, count)
        near = np.searchsorted(edges, tokens, "right") - 1
        source = starts_in_groups(size, owner, self.layout.cp)[near] + tokens - edges[near]
        target = expand(starts_in_groups(count, owner, self.layout.cp), count)[1]
        swap = self._swap(rank, owner[near], owner[to], source, target)
        size, halo = (each[owner == rank] for each in (size, count))
        whole = starts_of(size + halo)
        held, own = int(size.sum()), expand(whole + halo, size)[1]
        order = np.empty(held + int(halo.sum()), np.int64)
        order[own] = np.arange(held)
        order[expand(whole, halo)[1]] = held + np.arange(int(halo.sum()))
        return Halo(swap, order, np.append(whole, len(order)), own)

    def _swap(self, rank: int, sender: Ints, receiver: Ints, source: Ints, target: Ints) -> Swap:
        """From places of the ranks `sender` to places of the ranks `receiver`."""
        out, come = np.flatnonzero(sender == rank), np.flatnonzero(receiver == rank)
        out = out[np.argsort(receiver[out], kind="stable")]
        come = come[np.argsort(sender[come], kind="stable")]
        leaving, arriving = (
            np.bincount(peers, minlength=self.layout.cp) for peers in (receiver[out], sender[come])
        )
        return Swap(source[out], leaving, target[come], arriving)
