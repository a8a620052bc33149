"""The balanced layout: equal tokens per rank, minimal maximum work, and little on the wire.

Chunks go to ranks by longest processing time first, one to each rank in every round, so that token counts are equal.
Swaps then lower the maximum, and after that bring chunks that read one another onto one rank as far as balance allows.
"""

from __future__ import annotations

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, integer, union
from cp_ring.plan.tiles import cut

GOOD_BALANCE = 1.05
"""Maximum over mean work that is good enough; from there on, less on the wire is better."""

CHUNKS_PER_RANK = (2, 4, 8, 16, 32)

PAIRS, ROUNDS, MAX_CHUNKS = 1 << 13, 64, 1024
"""Bounds on the search for swaps: about so many are compared at once, so often, for layouts of so many chunks."""


def balanced_layout(mask: Mask, cp: int, chunks_per_rank: int | None = None) -> Layout:
    """The layout for `mask`; see `Layout.balanced`."""
    if integer(cp, "context parallel size") < 1:
        raise PlanError(f"context parallel size {cp} must be at least 1")
    if chunks_per_rank is not None and chunks_per_rank < 1:
        raise PlanError(f"chunks_per_rank {chunks_per_rank} must be at least 1")
    chunks = cp * (chunks_per_rank or 1)
    if mask.n < chunks:
        raise PlanError(f"balanced layout cuts the sequence into {chunks} chunks for cp {cp}, but it has {mask.n} tokens")
    if chunks_per_rank is not None:
        return _draw_together(mask, _level(mask, cp, chunks_per_rank, GOOD_BALANCE), GOOD_BALANCE)
    zigzag = [Layout.zigzag(mask.n, cp)] if mask.n >= 2 * cp else []
    limit = min([GOOD_BALANCE, *(balance(mask, layout) for layout in zigzag)])
    known = [layout for layout in (*zigzag, Layout.contiguous(mask.n, cp)) if np.ptp(layout.tokens_per_rank) <= (mask.n % cp > 0)]
    measured = [(balance(mask, layout), layout) for layout in known]
    for count in [count for count in CHUNKS_PER_RANK if count * cp <= mask.n] or [1]:
        layout = _level(mask, cp, count, limit)
        measured.append((balance(mask, layout), layout))
        if measured[-1][0] <= limit:
            break
    limit = max(limit, min(its for its, _ in measured))
    good = [layout for its, layout in measured if its <= limit]
    good = [_draw_together(mask, layout, limit) if layout.name == "balanced" else layout for layout in good]
    return min(good, key=lambda layout: wire(mask, layout))


def balance(mask: Mask, layout: Layout) -> float:
    """Maximum work of a rank over the mean."""
    work = np.bincount(layout.owner, chunk_work(mask, layout.edges), layout.cp)
    return float(work.max() / work.mean()) if work.any() else 1.0


def wire(mask: Mask, layout: Layout) -> int:
    """Tokens whose keys and values move, with no byte moved twice to one rank."""
    tiles, query_chunk, key_chunk = cut(mask.pieces, layout.edges)
    reader = layout.owner[query_chunk]
    away = np.flatnonzero(reader != layout.owner[key_chunk])
    _, start, end = union(reader[away], tiles.k0[away], tiles.k1[away])
    return int((end - start).sum())


def chunk_work(mask: Mask, edges: Ints) -> Ints:
    """Allowed pairs of the queries of each chunk, int64 [chunks]."""
    tiles, chunk, _ = cut(mask.pieces, edges, columns=np.array([0, mask.n]))
    return np.bincount(chunk, tiles.area(), len(edges) - 1).astype(np.int64)


def _longest_first(work: Ints, size: Ints, cp: int) -> Ints:
    """Owner of each chunk. In every round each rank gets one chunk, the rank with the least work the one with the most.

    A round's chunks are of one size, so that token counts are equal; at most one round has to mix both sizes.
    """
    large, small = (chunks[np.argsort(-work[chunks], kind="stable")] for chunks in _by_size(size))
    whole = len(large) // cp * cp
    mixed = cp - (len(large) - whole) if len(large) > whole else 0
    rounds = np.concatenate([large, small[:mixed], small[mixed:]]).reshape(-1, cp)
    owner, load = np.zeros(len(work), np.int64), np.zeros(cp, np.int64)
    for chunks in rounds[np.argsort(-work[rounds].max(1), kind="stable")]:
        chunks = chunks[np.argsort(-work[chunks], kind="stable")]
        ranks = np.argsort(load, kind="stable")
        owner[chunks] = ranks
        load[ranks] += work[chunks]
    return owner


def _by_size(size: Ints) -> tuple[Ints, Ints]:
    """Chunks of the larger of the two sizes, and of the smaller."""
    return np.flatnonzero(size > size.min()), np.flatnonzero(size == size.min())


def _level(mask: Mask, cp: int, per_rank: int, limit: float) -> Layout:
    """Longest first, and then swaps of the busiest rank with others, of chunks of one size, until the limit is reached."""
    edges = np.arange(cp * per_rank + 1) * mask.n // (cp * per_rank)
    size, work = np.diff(edges), chunk_work(mask, edges)
    owner = _longest_first(work, size, cp)
    load = np.bincount(owner, work, cp).astype(np.int64)
    for _ in range(2 * len(work)):
        top = int(load.argmax())
        if load[top] <= limit * load.mean():
            break
        mine = np.flatnonzero(owner == top)
        less = work[mine][:, None] - work
        after = np.maximum(load[top] - less, load[owner] + less)
        after[(size[mine][:, None] != size) | (owner == top)] = load[top]
        a, b = np.unravel_index(after.argmin(), after.shape)
        if after[a, b] >= load[top]:
            break
        a = mine[a]
        load[top], load[owner[b]] = load[top] - work[a] + work[b], load[owner[b]] - work[b] + work[a]
        owner[a], owner[b] = owner[b], top
    return Layout(mask.n, cp, edges, owner, "balanced")


def _draw_together(mask: Mask, layout: Layout, limit: float) -> Layout:
    """The layout with chunks of one size swapped so that less travels; no rank exceeds the limit, or the present maximum."""
    if layout.cp == 1 or len(layout.owner) > MAX_CHUNKS:
        return layout
    size, work = np.diff(layout.edges), chunk_work(mask, layout.edges)
    swaps = _Swaps(layout, work, _traffic(mask, layout.edges))
    ceiling = max(limit * swaps.load.mean(), swaps.load.max())
    for _ in range(ROUNDS):
        a, b, gain = swaps.offers()
        more = work[b] - work[a]
        light = (swaps.load[swaps.owner[a]] + more <= ceiling) & (swaps.load[swaps.owner[b]] - more <= ceiling)
        good = np.flatnonzero(light & (size[a] == size[b]) & (gain > 0))
        if not len(good):
            break
        # Swaps between different ranks do not change one another's gain, so the best of them are made together.
        used: set[int] = set()
        for pair in good[np.argsort(-gain[good], kind="stable")[: 8 * layout.cp]].tolist():
            ranks = {int(swaps.owner[a[pair]]), int(swaps.owner[b[pair]])}
            if not used & ranks:
                used |= ranks
                swaps.make(int(a[pair]), int(b[pair]), int(more[pair]))
    return Layout(layout.n, layout.cp, layout.edges, swaps.owner, layout.name)


class _Swaps:
    """Which chunks to swap so that chunks that read one another come together.

    `ties` int64 [chunks, cp] is what each chunk trades with the chunks of each rank.
    """

    def __init__(self, layout: Layout, work: Ints, traffic: Ints):
        self.owner = layout.owner.copy()
        self.load = np.bincount(layout.owner, work, layout.cp).astype(np.int64)
        self._traffic = traffic
        self._ties = np.stack([self._traffic[:, self.owner == rank].sum(1) for rank in range(layout.cp)], axis=1)
        self._per_rank = len(self.owner) // layout.cp
        self._ranks = int(np.clip(PAIRS // (len(self.owner) * self._per_rank), 1, layout.cp - 1)) if layout.cp > 1 else 0

    def offers(self) -> tuple[Ints, Ints, Ints]:
        """Swaps (chunk, other chunk, gain in traffic) of each chunk with all of the ranks with which it trades most."""
        chunks, owner = np.arange(len(self.owner)), self.owner
        wish = self._ties - self._ties[chunks, owner][:, None]
        wish[chunks, owner] = -1 << 60
        targets = np.argpartition(-wish, self._ranks - 1, axis=1)[:, : self._ranks]
        members = np.argsort(owner, kind="stable").reshape(-1, self._per_rank)
        b = members[targets].reshape(-1)
        a = np.repeat(chunks, self._ranks * self._per_rank)
        return a, b, wish[a, owner[b]] + wish[b, owner[a]] - 2 * self._traffic[a, b]

    def make(self, a: int, b: int, more: int) -> None:
        """Swaps two chunks; the rank of `a` has `more` work after it."""
        one, other = self.owner[a], self.owner[b]
        change = self._traffic[:, b] - self._traffic[:, a]
        self._ties[:, one] += change
        self._ties[:, other] -= change
        self.load[one] += more
        self.load[other] -= more
        self.owner[a], self.owner[b] = other, one


def _traffic(mask: Mask, edges: Ints) -> Ints:
    """What two chunks read of one another, symmetric int64 [chunks, chunks], in 1/64 tokens.

    A chunk that many others read is fetched once by each rank, not by each reader, so its rows count for less.
    """
    tiles, query_chunk, key_chunk = cut(mask.pieces, edges)
    count = len(edges) - 1
    group, start, end = union(query_chunk * count + key_chunk, tiles.k0, tiles.k1)
    reads = np.bincount(group, end - start, count * count).astype(np.int64).reshape(count, count)
    np.fill_diagonal(reads, 0)
    reads = reads * 64 // np.maximum((reads > 0).sum(0), 1)
    return reads + reads.T
