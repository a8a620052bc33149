"""Layers whose state runs along the sequence: the segments of it that ranks hold, and how the state
passes from each to the next.

The consecutive tokens of a rank are cut where the state begins anew or forks. A segment then begins
anew, or goes on with the state that another segment, its parent, hands on: the one before it, or at
a branch of a tree the end of the branch that it continues. A causal convolution needs the last
tokens before the segment besides, its halo. The bytes depend on neither the tokens nor the
documents, but on the borders of ranks that lie inside of documents.

States travel in one of three ways. In a chain, each segment sends the state after it, a border at a
time. In a gather, each sends its map, by which a state before it becomes one after it, to all ranks
that hold later segments of its document, at once. In doublings, each gets the map of the segment
before it, and then that of all which the segment 1, 2, 4, ... before it has. States that fork pass
in a chain, and a rank gets the state of a parent once for all branches there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask_table import MaskTable
from cp_ring.plan.ranges import (
    Ints,
    check_all,
    expand,
    integers,
    overlaps,
    starts_in_groups,
    starts_of,
)
from cp_ring.plan.sizes.device_rates import Rates

NO_FORKS: Ints = np.zeros((2, 0), np.int64)
MAPS_PAY = 2.0
"""Maps are sent where this takes less time than a chain by this factor. They are more bytes, which
other messages wait for.
"""


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
class Steps:
    """How states pass a rank.

    Attributes:
        offsets: where its segments begin in its shard, and its end: int64 [segments + 1].
        goes_on: its segments that get a state, ascending.
        gets: the state of each of these, among those that arrive. Branches share one.
        hands_on: its segments that hand one on, ascending. States that leave are theirs.
        steps: at step i, what it swaps, then the places (among the states that arrive, in
        `hands_on`) of those segments that now have a state and hand one on. All ranks have as many.
    """

    offsets: Ints
    goes_on: Ints
    gets: Ints
    hands_on: Ints
    steps: tuple[tuple[Swap, Ints, Ints], ...]


@dataclass(frozen=True, eq=False)
class Gather:
    """How the maps of segments, or the gradients of states with the maps that they pass, come to a
    rank at once.

    Attributes:
        swaps: of each wave, from places in `hands_on` (gradients: `goes_on`) to entries of a table
        of maps.
        walk: at step i, the entries whose map follows that of another entry, and these entries.
        ends: of each segment in `goes_on` (gradients: `hands_on`), the entry that it follows.
    """

    swaps: tuple[Swap, ...]
    walk: tuple[tuple[Ints, Ints], ...]
    ends: Ints


def forks_of(mask: MaskTable) -> Ints:
    """First tokens of branches that continue another one, and the tokens that they follow: int64
    [2, forks]. A branch follows the last earlier token that its first one sees.

    Raises `PlanError` where that is not the token of the position before.
    """
    if mask.segments is None:
        return NO_FORKS
    start = mask.segments[0, mask.segments[1] > 0]
    piece, which = overlaps(mask.pieces.q0, mask.pieces.q1, start, start + 1)
    p = mask.pieces[piece]
    key = np.minimum(p.k1, start[which] + np.minimum(p.hi, -1) + 1) - 1
    seen, follows = key >= np.maximum(p.k0, start[which] + p.lo), np.full(len(start), -1)
    np.maximum.at(follows, which[seen], key[seen])
    positions = mask.positions
    check_all(
        (follows >= 0) & (positions[follows] == positions[start] - 1),
        lambda i: (
            f"token {start[i]} at position {positions[start[i]]} follows none at position "
            f"{positions[start[i]] - 1}: a state passes along branches of a tree alone"
        ),
    )
    return np.stack([start, follows])


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of the stream of `layout`, in order.

    Attributes:
        starts: tokens at which the state begins anew, ascending, 0 among them.
        forks: other tokens, ascending, and the earlier ones whose state they go on with: int64
        [2, forks]. All others go on with that of the token before them.
        edges: where segments begin, and the end of the stream: int64 [segments + 1].
        owner: the rank that holds each: int64 [segments].
        parent: the segment whose state each goes on with, -1 if it begins anew: int64 [segments].
    """

    layout: Layout
    starts: Ints
    forks: Ints
    edges: Ints
    owner: Ints
    parent: Ints

    @classmethod
    def build(cls, layout: Layout, starts: Ints, forks: Ints = NO_FORKS) -> Chains:
        """`starts`: 0 may be missing. Raises `PlanError` for one outside of the stream."""
        starts = np.setdiff1d(np.union1d(integers(starts, "starts"), 0), forks[0])
        if starts[0] < 0 or starts[-1] >= layout.n:
            raise PlanError(f"a state that begins at {starts[[0, -1]]} of {layout.n} tokens")
        if (forks[1] >= forks[0]).any() or (forks < 0).any() or (forks >= layout.n).any():
            raise PlanError(f"states of {layout.n} tokens that fork at {forks[0]} from {forks[1]}")
        changes = layout.edges[:-1][np.diff(layout.owner, prepend=-1) != 0]
        first = np.unique(np.concatenate([changes, starts, forks[0], forks[1] + 1]))
        owner = layout.owner[np.searchsorted(layout.edges, first, "right") - 1]
        parent = np.arange(len(first)) - 1
        parent[np.isin(first, starts)] = -1
        parent[np.searchsorted(first, forks[0])] = np.searchsorted(first, forks[1], "right") - 1
        return cls(layout, starts, forks, np.append(first, layout.n), owner, parent)

    @classmethod
    def of_mask(cls, layout: Layout, mask: MaskTable) -> Chains:
        """States begin anew at position 0, and fork at branches of a tree; see `forks_of`."""
        return cls.build(layout, np.flatnonzero(mask.positions == 0), forks_of(mask))

    @cached_property
    def _above(self) -> tuple[Ints, Ints]:
        """Of each segment, how many lie between it and the one that began anew, and that one."""
        depth = (self.parent >= 0).astype(np.int64)
        root = np.where(depth > 0, self.parent, np.arange(len(depth)))
        while depth[root].any():
            depth, root = depth + depth[root], root[root]
        return depth, root

    @property
    def depth(self) -> Ints:
        """How many segments lie between each and the one that began anew: int64 [segments]."""
        return self._above[0]

    @property
    def _linked(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which segments go on, and which hand on: bool [segments]."""
        return self.parent >= 0, np.isin(np.arange(len(self.parent)), self.parent)

    @cached_property
    def _arrivals(self) -> tuple[Ints, Ints, Ints]:
        """Of each state that comes to a rank: the rank, ascending, and the segment after which it
        is. And which of them each segment gets.
        """
        goes, count = self.parent >= 0, len(self.parent)
        each, numbers = np.unique((self.owner * count + self.parent)[goes], return_inverse=True)
        gets = np.full(count, -1)
        gets[goes] = numbers
        return each // count, each % count, gets

    @property
    def links(self) -> int:
        """States that travel from rank to rank in forward, and as many gradients in backward."""
        ranks, segments, _ = self._arrivals
        return int(np.count_nonzero(self.owner[segments] != ranks))

    def steps(self, rank: int) -> Steps:
        goes, hands = self._linked
        ranks, segments, gets = self._arrivals
        place, row_out = (
            starts_in_groups(each.astype(np.int64), self.owner, self.layout.cp)
            for each in (self.parent >= -1, hands)
        )
        row_in = starts_in_groups(np.ones(len(ranks), np.int64), ranks, self.layout.cp)
        mine, gets = self.owner == rank, np.append(row_in, -1)[gets]
        steps = []
        for depth in range(int(self.depth.max())):
            to = np.flatnonzero(self.depth[segments] == depth)
            peers = self.owner[segments[to]], ranks[to]
            swap = self._swap(rank, *peers, row_out[segments[to]], row_in[to])
            both = np.flatnonzero(mine & hands & (self.depth == depth + 1))
            steps.append((swap, gets[both], row_out[both]))
        offsets = np.append(starts_of(np.diff(self.edges)[mine]), self.layout.tokens_per_rank[rank])
        goes &= mine
        return Steps(offsets, place[goes], gets[goes], place[mine & hands], tuple(steps))

    @property
    def waves(self) -> Ints:
        """When segments are computed: 0, the first ones of a rank in a document that hand their
        state on; 1, the others that share a document with other segments; 2, whole documents.
        """
        goes, hands = self._linked
        keys = np.where(hands, self._above[1] * self.layout.cp + self.owner, -1)
        first = np.zeros(len(keys), bool)
        first[np.unique(keys, return_index=True)[1]] = True
        return np.where(first & hands, 0, np.where(goes | hands, 1, 2))

    def _gathered(self, back: bool) -> tuple[Ints, Ints]:
        """(rank, segment) of each map that a rank needs, its own among them, ascending. back: of
        the gradients of states.
        """
        goes, hands = self._linked
        number, begun = np.arange(len(self.parent)), self._above[1]
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
        wave = np.zeros_like(segments) if back else self.waves[segments]
        swaps = []
        for number in range(1 if back else 2):
            to = np.flatnonzero(wave == number)
            peers = self.owner[segments[to]], ranks[to]
            swaps.append(self._swap(rank, *peers, places[segments[to]], entry[to]))
        mine = segments[ranks == rank]
        follows, next_to = (hands[mine], 1) if back else (goes[mine], -1)
        walk, order = [], self.depth[mine]
        for depth in sorted(set(order[follows].tolist()), reverse=back):
            entries = np.flatnonzero(follows & (order == depth))
            walk.append((entries, entries + next_to))
        wanted = np.flatnonzero(wants & (self.owner == rank)) + next_to
        return Gather(tuple(swaps), tuple(walk), np.searchsorted(mine, wanted))

    def _doubled(self, back: bool) -> list[tuple[Ints, Ints]]:
        """Of each step of doublings, the segments that send and those that get. back: of the
        gradients of states.
        """
        number = np.arange(len(self.parent))
        end = np.searchsorted(self._above[1], self._above[1], "right") - 1
        last = end - number if back else self.depth
        far = number + 1 if back else number - 1
        steps, distance = [(far[last > 0], number[last > 0])], 1
        while (last > distance).any():
            to = number[last > distance]
            steps.append((to + distance if back else to - distance, to))
            distance *= 2
        return steps

    def doublings(self, rank: int, back: bool = False) -> tuple[Swap, ...]:
        """What a rank swaps at each step: first from places in `hands_on` to places in `goes_on`
        (gradients: the other way), then among the latter.
        """
        goes, hands = self._linked
        places = [
            starts_in_groups(each.astype(np.int64), self.owner, self.layout.cp)
            for each in ((goes, hands) if back else (hands, goes))
        ]
        return tuple(
            self._swap(rank, self.owner[far], self.owner[to], places[step > 0][far], places[1][to])
            for step, (far, to) in enumerate(self._doubled(back))
        )

    def seconds(self, state: int, whole: int, rates: Rates, near: int) -> dict[str, float]:
        """Predicted seconds in which states pass forward, by the way; of the ways that there are.

        state: bytes of a state. whole: bytes of a map. near: neighboring ranks of a node.
        """

        def of(senders: Ints, receivers: Ints, size: int) -> float:
            inside = senders // near == receivers // near
            cost = np.where(inside, size / rates.inside, size / rates.between)
            cost[senders == receivers] = 0
            return rates.call + float(np.bincount(receivers, cost).max(initial=0.0))

        if not self.links:
            return {"chain": 0.0}
        to, segments, _ = self._arrivals
        owner, depth = self.owner[segments], self.depth[segments]
        steps = [np.flatnonzero(depth == step) for step in np.unique(depth[owner != to])]
        times = {"chain": sum(of(owner[at], to[at], state) for at in steps)}
        if not self.forks.size:
            ranks, segments = self._gathered(False)
            times["gather"] = of(self.owner[segments], ranks, whole)
            times["doublings"] = sum(
                of(self.owner[far], self.owner[to], whole) for far, to in self._doubled(False)
            )
        return times

    def way(self, state: int, whole: int, rates: Rates, near: int) -> str:
        """The way to take, by `seconds`: a chain, unless maps are faster by `MAPS_PAY`."""
        times = self.seconds(state, whole, rates, near)
        return min(times, key=lambda way: times[way] * (1 if way == "chain" else MAPS_PAY))

    def bytes(self, state: int, whole: int, way: str) -> int:
        """Bytes of states that all ranks send, forward and backward."""
        if way == "chain":
            return 2 * self.links * state
        both, owner = (False, True), self.owner
        if way == "gather":
            pairs = [(owner[segments], to) for to, segments in map(self._gathered, both)]
        else:
            pairs = [(owner[far], owner[to]) for back in both for far, to in self._doubled(back)]
        return whole * sum(int(np.count_nonzero(far != to)) for far, to in pairs)

    def halo_tokens(self, width: int) -> int:
        """Tokens that all ranks send for a convolution over `width` tokens."""
        to, near, _, count = self._halos(width)
        return int(count[self.owner[near] != self.owner[to]].sum())

    def _halos(self, width: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Of the parts of the halos, in order: the segment, the one that holds the part, the first
        token, and how many.
        """
        end, size = self.edges[1:], np.diff(self.edges)
        to, near = np.arange(len(size)), self.parent
        wanted = np.full(len(size), width - 1)
        parts: list[Ints] = [np.zeros((4, 0), np.int64)]
        while len(to := to[live := (near >= 0) & (wanted > 0)]):
            near, wanted = near[live], wanted[live]
            count = np.minimum(size[near], wanted)
            parts.append(np.stack([to, near, end[near] - count, count]))
            near, wanted = self.parent[near], wanted - count
        tokens = np.concatenate(parts[::-1], axis=1)
        tokens = tokens[:, np.argsort(tokens[0], kind="stable")]
        return tokens[0], tokens[1], tokens[2], tokens[3]

    def halo(self, rank: int, width: int) -> Halo:
        """For a convolution over `width` tokens, its own among them."""
        edges = self.edges
        to, near, first, count = self._halos(width)
        shard = starts_in_groups(np.diff(edges), self.owner, self.layout.cp)
        target = starts_in_groups(count, self.owner[to], self.layout.cp)
        which, tokens = expand(shard[near] + first - edges[near], count)
        places = expand(target, count)[1]
        peers = self.owner[near[which]], self.owner[to[which]]
        swap = self._swap(rank, *peers, tokens, places)
        mine = np.flatnonzero(self.owner == rank)
        size = np.diff(edges)[mine]
        halo = np.bincount(to, count, len(self.owner)).astype(np.int64)[mine]
        whole = starts_of(size + halo)
        held = int(self.layout.tokens_per_rank[rank])
        own = expand(whole + halo, size)[1]
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
