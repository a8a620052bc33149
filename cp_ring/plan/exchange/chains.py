"""Layers whose state runs along the sequence: the segments of it that ranks hold, and how the state
passes from each to the next.

The consecutive tokens of a rank are cut where the state begins anew. A segment then begins anew, or
goes on with the state that the segment before it, of another rank, hands on. A causal convolution
needs the last tokens before the segment besides, its halo. The bytes depend on neither the tokens
nor the documents, but on the borders of ranks that lie inside of documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, integers, overlaps, starts_in_groups, starts_of


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
    def links(self) -> int:
        """States that travel from rank to rank in forward, and as many gradients in backward."""
        return int(np.count_nonzero(self.depth))

    def steps(self, rank: int) -> Steps:
        goes, hands = self.depth > 0, np.append(self.depth[1:] > 0, False)
        place, row_in, row_out = (
            starts_in_groups(each.astype(np.int64), self.owner, self.layout.cp)
            for each in (self.depth >= 0, goes, hands)
        )
        mine = self.owner == rank
        steps = []
        for depth in range(1, int(self.depth.max()) + 1):
            to = np.flatnonzero(self.depth == depth)
            swap = self._swap(rank, to - 1, to, row_out[to - 1], row_in[to])
            both = to[mine[to] & hands[to]]
            steps.append((swap, row_in[both], row_out[both]))
        offsets = np.append(starts_of(np.diff(self.edges)[mine]), self.layout.tokens_per_rank[rank])
        return Steps(offsets, place[mine & goes], place[mine & hands], tuple(steps))

    def halo(self, rank: int, width: int) -> Halo:
        """For a convolution over `width` tokens, its own among them."""
        edges = self.edges
        begun = edges[np.arange(len(self.depth)) - self.depth]
        before = np.maximum(begun, edges[:-1] - width + 1)
        to, near = overlaps(before, edges[:-1], edges[:-1], edges[1:])
        first = np.maximum(before[to], edges[near])
        count = np.minimum(edges[to], edges[near + 1]) - first
        shard = starts_in_groups(np.diff(edges), self.owner, self.layout.cp)
        target = starts_in_groups(count, self.owner[to], self.layout.cp)
        which, tokens = expand(shard[near] + first - edges[near], count)
        places = expand(target, count)[1]
        swap = self._swap(rank, near[which], to[which], tokens, places)
        mine = np.flatnonzero(self.owner == rank)
        size, halo = np.diff(edges)[mine], (edges[:-1] - before)[mine]
        whole = starts_of(size + halo)
        held = int(self.layout.tokens_per_rank[rank])
        own = expand(whole + halo, size)[1]
        order = np.empty(held + int(halo.sum()), np.int64)
        order[own] = np.arange(held)
        order[expand(whole, halo)[1]] = held + np.arange(int(halo.sum()))
        return Halo(swap, order, np.append(whole, len(order)), own)

    def _swap(self, rank: int, before: Ints, to: Ints, source: Ints, target: Ints) -> Swap:
        """From places of the segments `before` to places of the segments `to`."""
        sender, receiver = self.owner[before], self.owner[to]
        out, come = np.flatnonzero(sender == rank), np.flatnonzero(receiver == rank)
        out = out[np.argsort(receiver[out], kind="stable")]
        come = come[np.argsort(sender[come], kind="stable")]
        leaving, arriving = (
            np.bincount(peers, minlength=self.layout.cp) for peers in (receiver[out], sender[come])
        )
        return Swap(source[out], leaving, target[come], arriving)

    def verify(self, width: int = 4) -> None:
        """Plays all ranks, with positions in place of tokens and ranges of positions in place of
        states: each segment must get the state of its document up to the token before it, and those
        of `width - 1` tokens before it that are in its document. Raises `PlanError`.
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
        for rank, plan in enumerate(ranks):
            wanted = np.stack([begun[rank][plan.offsets[:-1]], first[rank]], 1)
            goes = wanted[:, 0] != wanted[:, 1]
            found = np.full_like(wanted, -1)
            found[plan.goes_on] = states[rank]
            if not np.array_equal(np.flatnonzero(goes), plan.goes_on) or (
                (found != wanted)[goes].any()
            ):
                raise PlanError(
                    f"rank {rank}: states of the tokens {found.tolist()}, not {wanted.tolist()}"
                )


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
