"""The balanced layout: equal tokens per rank, the least maximum work, and few moved keys.

Chunks go to ranks by longest processing time first, one to each rank in every round, so that token
counts are equal. Swaps of chunks then lower the maximum. Further swaps bring chunks that read each
other to one rank, as far as balance allows.

Tokens stay where they are from layer to layer. So the work and the traffic of a layout are the sums
over all layers: a list of masks, each with the number of layers that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, union
from cp_ring.plan.tiles import split_at_edges

GOOD_BALANCE = 1.05
"""Maximum over mean work that is good enough; among layouts that reach it, the one that moves
fewest keys is taken.
"""

CHUNKS_PER_RANK = (2, 4, 8, 16, 32)

PAIRS, ROUNDS, MAX_CHUNKS, WORTH_A_ROUND = 1 << 11, 64, 1024, 1e-5
"""Search limits of the swaps that reduce traffic: pairs per round (roughly), rounds, chunks of a
layout, and, for each chunk, the share of the traffic between ranks that a round must save for
another one to follow: rounds cost more with more chunks."""

FINE = 8
"""Chunks per rank for which work is measured at once. Coarser chunks are unions of them, so their
work is a sum.
"""


Layers = Sequence[tuple[Mask, int]]
"""Masks of one length, and the number of layers that have each."""


class Chunks(Protocol):
    """Chunks `[edges[c], edges[c + 1])` of a stream and their owners, as a `Layout` has them."""

    @property
    def edges(self) -> Ints: ...
    @property
    def owner(self) -> Ints: ...
    @property
    def cp(self) -> int: ...


class Split(NamedTuple):
    """Chunks and their owners, found by the search."""

    edges: Ints
    owner: Ints
    cp: int


def balanced_split(
    layers: Layers,
    cp: int,
    chunks_per_rank: int | None,
    others: Sequence[Chunks],
    token_work: float = 0,
) -> Chunks:
    """The split of `Layout.balanced`, or one of `others` if that is as balanced and moves fewer
    keys.

    `others` are even splits into chunks for the same ranks. The search for balance stops at a
    maximum over mean work of `GOOD_BALANCE` or what the first of `others` reaches, the smaller of
    the two. Every token costs `token_work` pairs beside. Raises `PlanError` if there are fewer
    tokens than chunks.
    """
    if chunks_per_rank is not None and chunks_per_rank < 1:
        raise PlanError(f"chunks_per_rank {chunks_per_rank} must be at least 1")
    n, chunks = _tokens(layers), cp * (chunks_per_rank or 1)
    if n < chunks:
        raise PlanError(
            f"balanced layout cuts the sequence into {chunks} chunks for cp {cp}, but it has {n} "
            "tokens"
        )
    work = _EvenWork(layers, cp, token_work)
    if chunks_per_rank is not None:
        return _reduce_traffic(
            layers, _equalize_work(work, chunks_per_rank, GOOD_BALANCE), work, GOOD_BALANCE
        )
    measured: list[tuple[float, Chunks]] = [(work.balance(other), other) for other in others]
    limit = min([GOOD_BALANCE, *(reached for reached, _ in measured[:1])])
    for count in [count for count in CHUNKS_PER_RANK if count * cp <= n] or [1]:
        split = _equalize_work(work, count, limit)
        measured.append((work.balance(split), split))
        if measured[-1][0] <= limit:
            break
    limit = max(limit, min(reached for reached, _ in measured))
    good = [split for reached, split in measured if reached <= limit]
    good = [
        _reduce_traffic(layers, split, work, limit) if isinstance(split, Split) else split
        for split in good
    ]
    return good[0] if len(good) == 1 else min(good, key=lambda split: tokens_moved(layers, split))


class _EvenWork:
    """The work of each chunk of even splits into a multiple of `cp` chunks, measured once for many
    of them.
    """

    def __init__(self, layers: Layers, cp: int, token_work: float = 0):
        self.cp, self.n, self._layers, self._token_work = cp, _tokens(layers), layers, token_work
        self._known: dict[int, Ints] = {}

    def edges(self, per_rank: int) -> Ints:
        return np.arange(self.cp * per_rank + 1) * self.n // (self.cp * per_rank)

    def of(self, per_rank: int) -> Ints:
        """Allowed pairs of the queries of each chunk, and what its tokens cost beside, int64 [cp *
        per_rank].
        """
        if per_rank not in self._known:
            fine = FINE if FINE % per_rank == 0 and self.cp * FINE <= self.n else per_rank
            if fine not in self._known:
                edges = self.edges(fine)
                beside = np.rint(self._token_work * np.diff(edges)).astype(np.int64)
                self._known[fine] = chunk_work(self._layers, edges) + beside
            self._known[per_rank] = self._known[fine].reshape(-1, fine // per_rank).sum(1)
        return self._known[per_rank]

    def balance(self, split: Chunks) -> float:
        """Maximum work of a rank over the mean."""
        return _balance(self.of(len(split.owner) // self.cp), split)


def balance(layers: Layers, layout: Chunks) -> float:
    """Maximum work of a rank over the mean."""
    return _balance(chunk_work(layers, layout.edges), layout)


def _balance(work: Ints, layout: Chunks) -> float:
    load = np.bincount(layout.owner, work, layout.cp)
    return float(load.max() / load.mean()) if load.any() else 1.0


def tokens_moved(layers: Layers, layout: Chunks) -> int:
    """Tokens whose keys and values move, once for each rank that reads them and each layer."""
    moved = 0
    for mask, count in layers:
        tiles, query_chunk, key_chunk = split_at_edges(mask.pieces, layout.edges)
        reader = layout.owner[query_chunk]
        away = np.flatnonzero(reader != layout.owner[key_chunk])
        _, start, end = union(reader[away], tiles.k0[away], tiles.k1[away])
        moved += count * int((end - start).sum())
    return moved


def chunk_work(layers: Layers, edges: Ints) -> Ints:
    """Allowed pairs of the queries of each chunk, summed over layers, int64 [chunks]."""
    work = np.zeros(len(edges) - 1, np.int64)
    for mask, count in layers:
        tiles, chunk, _ = split_at_edges(mask.pieces, edges, key_edges=np.array([0, mask.n]))
        work += count * np.bincount(chunk, tiles.area(), len(work)).astype(np.int64)
    return work


def _longest_first(work: Ints, size: Ints, cp: int) -> Ints:
    """Owner of each chunk, int64 [chunks].

    In every round each rank gets one chunk: the rank with the least work so far gets the chunk with
    the most. The chunks of a round have the same size, so that token counts are equal; at most one
    round mixes the two sizes.
    """
    order = np.argsort(-work, kind="stable")
    large = order[size[order] > size.min()]
    small = order[size[order] == size.min()]
    whole = len(large) // cp * cp
    mixed = cp - (len(large) - whole) if len(large) > whole else 0
    rounds = np.concatenate([large, small[:mixed], small[mixed:]]).reshape(-1, cp)
    owner = np.zeros(len(work), np.int64)
    load = np.zeros(cp, np.int64)
    for chunks in rounds[np.argsort(-work[rounds].max(1), kind="stable")]:
        chunks = chunks[np.argsort(-work[chunks], kind="stable")]
        ranks = np.argsort(load, kind="stable")
        owner[chunks] = ranks
        load[ranks] += work[chunks]
    return owner


def _equalize_work(even: _EvenWork, per_rank: int, limit: float) -> Split:
    """Longest first, then swaps of equally large chunks between the busiest rank and others, until
    `limit` is reached.
    """
    edges, work, cp = even.edges(per_rank), even.of(per_rank), even.cp
    size = np.diff(edges)
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
        load[top], load[owner[b]] = (
            load[top] - work[a] + work[b],
            load[owner[b]] - work[b] + work[a],
        )
        owner[a], owner[b] = owner[b], top
    return Split(edges, owner, cp)


def _reduce_traffic(layers: Layers, split: Split, even: _EvenWork, limit: float) -> Split:
    """The split after swaps of equally large chunks that reduce traffic. No rank exceeds `limit` or
    the present maximum.
    """
    per_rank = len(split.owner) // split.cp
    if split.cp == 1 or len(split.owner) > MAX_CHUNKS:
        return split
    swaps = _Swaps(split, even.of(per_rank), *_traffic(layers, split.edges), limit)
    for _ in range(ROUNDS):
        a, b, gain = swaps.candidates()
        # Swaps between different pairs of ranks do not change each other's gain, so a round makes
        # the best of them together.
        best = np.argsort(-gain, kind="stable")[: 8 * split.cp]
        used: set[int] = set()
        chosen = []
        for pair, one, other in zip(
            best.tolist(), swaps.owner[a[best]].tolist(), swaps.owner[b[best]].tolist(), strict=True
        ):
            if one not in used and other not in used:
                used |= {one, other}
                chosen.append(pair)
        if not chosen:
            break
        swaps.make(a[chosen], b[chosen])
        saved = int(gain[chosen].sum())
        swaps.between -= saved
        if saved < WORTH_A_ROUND * len(swaps.owner) * swaps.between:
            break
    return Split(split.edges, swaps.owner, split.cp)


class _Swaps:
    """Owners of chunks while chunks are swapped, and the traffic between chunks and ranks.

    `pairs` and `amount` are the traffic, see `_traffic`. `_of_rank` int64 [cp, chunks] is the
    traffic of each chunk with all chunks of each rank, `between` the traffic between chunks of
    different ranks, each counted once. No rank gets more work than `limit` times the mean, or than
    the present maximum.
    """

    def __init__(
        self, split: Split, work: Ints, pairs: tuple[Ints, Ints], amount: Ints, limit: float
    ):
        self.owner, self._work, self._size = split.owner.copy(), work, np.diff(split.edges)
        chunks, cp = len(work), split.cp
        self._load = np.bincount(split.owner, work, cp).astype(np.int64)
        self._ceiling = max(limit * self._load.mean(), self._load.max())
        (a, b), same = pairs, split.owner[pairs[0]] == split.owner[pairs[1]]
        self.between = int(amount[~same].sum()) // 2
        self._traffic = np.zeros((chunks, chunks), np.int64)
        self._traffic[a, b] = amount
        self._of_rank = (
            np.bincount(split.owner[a] * chunks + b, amount, cp * chunks)
            .astype(np.int64)
            .reshape(cp, chunks)
        )
        self._per_rank = chunks // cp
        self._uneven = bool(np.ptp(self._size))

    def candidates(self) -> tuple[Ints, Ints, Ints]:
        """Swaps (chunk, other chunk, gain) that save traffic: of each chunk with one of each rank
        with more traffic to it.

        The gain is the traffic between ranks that the swap saves. Of two chunks that gain together,
        one gains by itself.
        """
        owner, chunks = self.owner, len(self.owner)
        gain = self._of_rank - self._of_rank[owner, np.arange(chunks)]
        gaining = np.flatnonzero(gain > 0)
        most = PAIRS // self._per_rank
        if len(gaining) > most:
            gaining = np.sort(gaining[np.argpartition(-gain.reshape(-1)[gaining], most)[:most]])
        rank, a = np.divmod(gaining, chunks)
        b = np.argsort(owner, kind="stable").reshape(-1, self._per_rank)[rank]
        one, a_ = owner[a][:, None], a[:, None]
        saved = gain[rank, a][:, None] + gain[one, b] - 2 * self._traffic[a_, b]
        more = self._work[b] - self._work[a_]
        fits = (self._load[one] + more <= self._ceiling) & (
            self._load[rank][:, None] - more <= self._ceiling
        )
        if self._uneven:
            fits &= self._size[b] == self._size[a_]
        saved *= fits
        best = np.arange(len(a)), saved.argmax(1)
        saved, b = saved[best], b[best]
        good = np.flatnonzero(saved > 0)
        return a[good], b[good], saved[good]

    def make(self, a: Ints, b: Ints) -> None:
        """Swaps each chunk of `a` with that of `b`. Their owners are all different."""
        one, other = self.owner[a], self.owner[b]
        change, more = self._traffic[b] - self._traffic[a], self._work[b] - self._work[a]
        self._of_rank[one] += change
        self._of_rank[other] -= change
        self._load[one] += more
        self._load[other] -= more
        self.owner[a], self.owner[b] = other, one


def _traffic(layers: Layers, edges: Ints) -> tuple[tuple[Ints, Ints], Ints]:
    """Keys that two chunks read of each other, in 1/64 tokens: (the chunks of each pair, twice, in
    both orders; their traffic).

    A rank fetches a chunk once, however many of its chunks read it. So the tokens of a chunk count
    for less the more chunks read it.
    """
    chunks = len(edges) - 1
    groups, amounts = [], []
    for mask, count in layers:
        tiles, query_chunk, key_chunk = split_at_edges(mask.pieces, edges)
        away = np.flatnonzero(query_chunk != key_chunk)
        group, start, end = union(
            query_chunk[away] * chunks + key_chunk[away], tiles.k0[away], tiles.k1[away]
        )
        group, which = np.unique(group, return_inverse=True)
        reads = np.bincount(which, end - start, len(group)).astype(np.int64)
        reader, read = np.divmod(group, chunks)
        amount = count * (reads * 64 // np.bincount(read, minlength=chunks)[read])
        groups += [group, read * chunks + reader]
        amounts += [amount, amount]
    pairs, which = np.unique(np.concatenate(groups), return_inverse=True)
    total = np.bincount(which, np.concatenate(amounts), len(pairs)).astype(np.int64)
    a, b = np.divmod(pairs, chunks)
    return (a, b), total


def _tokens(layers: Layers) -> int:
    return layers[0][0].n
