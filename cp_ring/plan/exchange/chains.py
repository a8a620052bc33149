"""Layers whose state runs along the sequence: the segments of it that ranks hold, and how the state
passes from each to the next.

The consecutive tokens of a rank are cut where the state begins anew. A segment then begins anew, or
goes on with the state that the segment before it, of another rank, hands on. A causal convolution
needs the last tokens before the segment besides, its halo. The bytes depend on neither the tokens
nor the documents, but on the borders of ranks that lie inside of documents.

States travel in one of two ways. In a chain, each segment sends the state after it, a border at a
time. In a gather, each sends its map, by which a state before it becomes one after it, to all ranks
that hold later segments of its document, at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, integers, overlaps, starts_in_groups, starts_of
from cp_ring.plan.sizes.device_rates import Rates

GATHER_PAYS = 2.0
"""A gather is taken where it takes less time than a chain by this factor. It moves more bytes,
which other messages wait for.
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
        goes_on: its segments that get a state, ascending. States that arrive are theirs.
        hands_on: its segments that hand one on, ascending. States that leave are theirs.
        steps: at step i, what it swaps, then the places (in `goes_on`, in `hands_on`) of those
        segments that now have a state and hand one on. All ranks have as many.
    """

    offsets: Ints
    goes_on: Ints
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


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of the stream of `layout`, in order.

    Attributes:
        starts: tokens at which the state begins anew, ascending, 0 among them.
        edges: where segments begin, and the end of the stream: int64 [segments + 1].
        owner: the rank that holds each: int64 [segments].
        depth: how many segments lie between it and the one that began anew: int64 [segments].
    """

    layout: Layout
    starts: Ints
    edges: Ints
    owner: Ints
    depth: Ints

    @classmethod
    def build(cls, layout: Layout, starts: Ints) -> Chains:
        """`starts`: 0 may be missing. Raises `PlanError` for one outside of the stream."""
        starts = np.union1d(integers(starts, "starts"), 0)
        if starts[0] < 0 or starts[-1] >= layout.n:
            raise PlanError(f"a state that begins at {starts[[0, -1]]} of {layout.n} tokens")
        changes = layout.edges[:-1][np.diff(layout.owner, prepend=-1) != 0]
        first = np.union1d(changes, starts)
        owner = layout.owner[np.searchsorted(layout.edges, first, "right") - 1]
        places = np.arange(len(first))
        depth = places - np.maximum.accumulate(np.where(np.isin(first, starts), places, 0))
        return cls(layout, starts, np.append(first, layout.n), owner, depth)

    @property
    def _linked(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which segments go on, and which hand on: bool [segments]."""
        return self.depth > 0, np.append(self.depth[1:] > 0, False)

    @property
    def links(self) -> int:
        """States that travel from rank to rank in forward, and as many gradients in backward."""
        return int(np.count_nonzero(self.depth))

    def steps(self, rank: int) -> Steps:
        goes, hands = self._linked
        place, row_in, row_out = (
            starts_in_groups(each.astype(np.int64), self.owner, self.layout.cp)
            for each in (self.depth >= 0, goes, hands)
        )
        mine = self.owner == rank
        steps = []
        for depth in range(1, int(self.depth.max()) + 1):
            to = np.flatnonzero(self.depth == depth)
            peers = self.owner[to - 1], self.owner[to]
            swap = self._swap(rank, *peers, row_out[to - 1], row_in[to])
            both = to[mine[to] & hands[to]]
            steps.append((swap, row_in[both], row_out[both]))
        offsets = np.append(starts_of(np.diff(self.edges)[mine]), self.layout.tokens_per_rank[rank])
        return Steps(offsets, place[mine & goes], place[mine & hands], tuple(steps))

    @property
    def waves(self) -> Ints:
        """When segments are computed: 0, the first ones of a rank in a document that hand their
        state on; 1, the others that share a document with other segments; 2, whole documents.
        """
        goes, hands = self._linked
        begun = np.arange(len(self.depth)) - self.depth
        keys = np.where(hands, begun * self.layout.cp + self.owner, -1)
        first = np.zeros(len(keys), bool)
        first[np.unique(keys, return_index=True)[1]] = True
        return np.where(first & hands, 0, np.where(goes | hands, 1, 2))

    def _gathered(self, back: bool) -> tuple[Ints, Ints]:
        """(rank, segment) of each map that a rank needs, its own among them, ascending. back: of
        the gradients of states.
        """
        goes, hands = self._linked
        number = np.arange(len(self.depth))
        begun = number - self.depth
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
        given = starts_in_groups(gives.astype(np.int64), self.owner, self.layout.cp)
        ranks, segments = self._gathered(back)
        entry = starts_in_groups(np.ones(len(ranks), np.int64), ranks, self.layout.cp)
        wave = np.zeros_like(segments) if back else self.waves[segments]
        swaps = []
        for number in range(1 if back else 2):
            to = np.flatnonzero(wave == number)
            peers = self.owner[segments[to]], ranks[to]
            swaps.append(self._swap(rank, *peers, given[segments[to]], entry[to]))
        mine = segments[ranks == rank]
        follows, next_to = (hands[mine], 1) if back else (goes[mine], -1)
        walk, order = [], self.depth[mine]
        for depth in sorted(set(order[follows].tolist()), reverse=back):
            entries = np.flatnonzero(follows & (order == depth))
            walk.append((entries, entries + next_to))
        wanted = np.flatnonzero(wants & (self.owner == rank)) + next_to
        return Gather(tuple(swaps), tuple(walk), np.searchsorted(mine, wanted))

    def seconds(self, state: int, whole: int, rates: Rates, near: int) -> tuple[float, float]:
        """Predicted seconds in which states pass forward: in a chain, in a gather.

        state: bytes of a state. whole: bytes of a map. near: neighboring ranks of a node.
        """

        def of(senders: Ints, receivers: Ints, size: int) -> float:
            inside = senders // near == receivers // near
            cost = np.where(
                inside, size / rates.inside, size * rates.ranks_per_card / rates.between
            )
            cost[senders == receivers] = 0
            return rates.call + float(np.bincount(receivers, cost).max(initial=0.0))

        if not self.links:
            return 0.0, 0.0
        steps = [np.flatnonzero(self.depth == d) for d in range(1, int(self.depth.max()) + 1)]
        ranks, segments = self._gathered(False)
        return (
            sum(of(self.owner[to - 1], self.owner[to], state) for to in steps),
            of(self.owner[segments], ranks, whole),
        )

    def gathers(self, state: int, whole: int, rates: Rates, near: int) -> bool:
        """Whether the gather is the way to take, by `seconds`."""
        chain, gather = self.seconds(state, whole, rates, near)
        return GATHER_PAYS * gather < chain

    def bytes(self, state: int, whole: int, gathers: bool) -> int:
        """Bytes of states that all ranks send, forward and backward."""
        if not gathers:
            return 2 * self.links * state
        pairs = (self._gathered(back) for back in (False, True))
        return whole * sum(int((self.owner[segments] != to).sum()) for to, segments in pairs)

    def halo_tokens(self, width: int) -> int:
        """Tokens that all ranks send for a convolution over `width` tokens."""
        _, to, near, _, count = self._halos(width)
        return int(count[self.owner[near] != self.owner[to]].sum())

    def _halos(self, width: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Where the halo of each segment begins; and of its parts the segment, the one that holds
        the part, the first token, and how many.
        """
        edges = self.edges
        begun = edges[np.arange(len(self.depth)) - self.depth]
        before = np.maximum(begun, edges[:-1] - width + 1)
        to, near = overlaps(before, edges[:-1], edges[:-1], edges[1:])
        first = np.maximum(before[to], edges[near])
        return before, to, near, first, np.minimum(edges[to], edges[near + 1]) - first

    def halo(self, rank: int, width: int) -> Halo:
        """For a convolution over `width` tokens, its own among them."""
        edges = self.edges
        before, to, near, first, count = self._halos(width)
        shard = starts_in_groups(np.diff(edges), self.owner, self.layout.cp)
        target = starts_in_groups(count, self.owner[to], self.layout.cp)
        which, tokens = expand(shard[near] + first - edges[near], count)
        places = expand(target, count)[1]
        peers = self.owner[near[which]], self.owner[to[which]]
        swap = self._swap(rank, *peers, tokens, places)
        mine = np.flatnonzero(self.owner == rank)
        size, halo = np.diff(edges)[mine], (edges[:-1] - before)[mine]
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

    def verify(self, width: int) -> None:
        """Plays all ranks, with positions in place of tokens and ranges of positions in place of
        states and maps: each segment must get the state of its document up to the token before it,
        and those of `width - 1` tokens before it that are in its document. The gradients of the
        states after it must come from all later segments of its document. Raises `PlanError`.

        width: of the causal convolution that runs, its own token among them.
        """
        cp = self.layout.cp
        ranks, halos = [self.steps(r) for r in range(cp)], [self.halo(r, width) for r in range(cp)]
        held = [self.layout.positions(rank) for rank in range(cp)]
        begun = [self.starts[np.searchsorted(self.starts, x, "right") - 1] for x in held]
        arrived = _played([halo.swap for halo in halos], held, [halo.swap.target for halo in halos])
        for rank, (plan, halo) in enumerate(zip(ranks, halos, strict=True)):
            whole = np.append(held[rank], arrived[rank])[halo.order]
            parts = np.split(held[rank], plan.offsets[1:-1])
            for part, wide in zip(parts, np.split(whole, halo.offsets[1:-1]), strict=True):
                inside = np.isin(part[1:], self.starts).any()
                anew = self.starts[np.searchsorted(self.starts, part[0], "right") - 1]
                wanted = np.arange(max(anew, part[0] - width + 1), part[-1] + 1)
                if inside or not np.array_equal(wide, wanted):
                    raise PlanError(f"rank {rank}: the tokens {wide} are not {wanted}, a segment")
            if not np.array_equal(whole[halo.own], held[rank]):
                raise PlanError(f"rank {rank}: outputs of a convolution are in other places")
        # (where it began, the next token) of each state; -1 is none
        last = [x[plan.offsets[1:] - 1] for x, plan in zip(held, ranks, strict=True)]
        first = [x[plan.offsets[:-1]] for x, plan in zip(held, ranks, strict=True)]
        states = [np.full((len(plan.goes_on), 2), -1) for plan in ranks]
        outs = [np.full((len(plan.hands_on), 2), -1) for plan in ranks]
        for rank, plan in enumerate(ranks):
            anew = ~np.isin(plan.hands_on, plan.goes_on)
            segments = plan.hands_on[anew]
            outs[rank][anew] = np.stack([first[rank][segments], last[rank][segments] + 1], 1)
        for step in zip(*(plan.steps for plan in ranks), strict=True):
            states = _played([swap for swap, _, _ in step], outs, states)
            for rank, (_, given, gone) in enumerate(step):
                end = last[rank][ranks[rank].hands_on[gone]] + 1
                outs[rank][gone] = np.stack([states[rank][given, 0], end], 1)
        spans = [np.stack([x, y + 1], 1) for x, y in zip(first, last, strict=True)]
        ends = [
            np.append(self.starts, self.layout.n)[np.searchsorted(self.starts, y, "right")]
            for y in last
        ]
        gathered = self._played_gather(
            False, [x[p.hands_on] for x, p in zip(spans, ranks, strict=True)]
        )
        returned = self._played_gather(
            True, [x[p.goes_on] for x, p in zip(spans, ranks, strict=True)]
        )
        for rank, plan in enumerate(ranks):
            wanted = np.stack([begun[rank][plan.offsets[:-1]], first[rank]], 1)
            later = np.stack([last[rank] + 1, ends[rank]], 1)
            _compare(rank, "states", plan.goes_on, states[rank], wanted)
            _compare(rank, "states of a gather", plan.goes_on, gathered[rank], wanted)
            _compare(rank, "gradients", plan.hands_on, returned[rank], later)

    def _played_gather(self, back: bool, given: list[Ints]) -> list[Ints]:
        """The tokens (first, one past the last) of which the composed maps are that each rank ends
        with, from those of the maps that it gives.
        """
        plans = [self.gather(rank, back) for rank in range(self.layout.cp)]
        tables = [np.full((sum(len(x.target) for x in p.swaps), 2), -1) for p in plans]
        for wave in zip(*(p.swaps for p in plans), strict=True):
            tables = _played(list(wave), given, tables)
        here, there = (0, 1) if back else (1, 0)
        for rank, plan in enumerate(plans):
            for entries, others in plan.walk:
                if (tables[rank][entries, here ^ 1] != tables[rank][others, here]).any():
                    raise PlanError(f"rank {rank}: maps that do not follow each other: {entries}")
                tables[rank][entries, there] = tables[rank][others, there]
        return [table[plan.ends] for table, plan in zip(tables, plans, strict=True)]


def _compare(rank: int, what: str, places: Ints, found: Ints, wanted: Ints) -> None:
    """Raises `PlanError` unless the ranges `found` at `places` are all of `wanted` that are not
    empty.
    """
    some = np.flatnonzero(wanted[:, 0] != wanted[:, 1])
    if not np.array_equal(some, places) or not np.array_equal(found, wanted[some]):
        raise PlanError(f"rank {rank}: {what} of the tokens {found.tolist()}, not {wanted[some]}")


def _played(swaps: list[Swap], held: list[Ints], before: list[Ints]) -> list[Ints]:
    """What each rank has after the swap: `before`, with what has arrived."""
    parts = [np.split(held[r][x.source], np.cumsum(x.leaving)[:-1]) for r, x in enumerate(swaps)]
    outs = [x.copy() for x in before]
    for rank, swap in enumerate(swaps):
        come = [of_peer[rank] for of_peer in parts]
        if [len(part) for part in come] != swap.arriving.tolist():
            raise PlanError(f"rank {rank} awaits {swap.arriving}, but others send {come}")
        outs[rank][swap.target] = np.concatenate(come)
    return outs
