"""The balanced layout: equal tokens per rank, the least maximum work, and few moved keys.

Chunks go to ranks by longest processing time first, one to each rank in every round, so that token counts are equal.
Swaps of chunks then lower the maximum. Further swaps bring chunks that read each other to one rank, as far as balance
allows.

Tokens stay where they are from layer to layer. So the work and the traffic of a layout are the sums over all layers: a list of
masks, each with the number of layers that have it.
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
"""Maximum over mean work that is good enough; among layouts that reach it, the one that moves fewest keys is taken."""

CHUNKS_PER_RANK = (2, 4, 8, 16, 32)

PAIRS, ROUNDS, MAX_CHUNKS = 1 << 13, 64, 1024
"""Search limits of the swaps that reduce traffic: pairs per round (roughly), rounds, and chunks of a layout."""


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


def balanced_split(layers: Layers, cp: int, chunks_per_rank: int | None, others: Sequence[Chunks], first_limit: float) -> Chunks:
    """The split of `Layout.balanced`, or one of `others` if that is as balanced and moves fewer keys.

    The search for balance stops at a maximum over mean work of `first_limit` or `GOOD_BALANCE`, the smaller of the two.
    Raises `PlanError` if there are fewer tokens than chunks.
    """
    if chunks_per_rank is not None and chunks_per_rank < 1:
        raise PlanError(f"chunks_per_rank {chunks_per_rank} must be at least 1")
    n, chunks = _tokens(layers), cp * (chunks_per_rank or 1)
    if n < chunks:
        raise PlanError(f"balanced layout cuts the sequence into {chunks} chunks for cp {cp}, but it has {n} tokens")
    if chunks_per_rank is not None:
        return _reduce_traffic(layers, _equalize_work(layers, cp, chunks_per_rank, GOOD_BALANCE), GOOD_BALANCE)
    limit = min(GOOD_BALANCE, first_limit)
    measured: list[tuple[float, Chunks]] = [(balance(layers, other), other) for other in others]
    for count in [count for count in CHUNKS_PER_RANK if count * cp <= n] or [1]:
        split = _equalize_work(layers, cp, count, limit)
        measured.append((balance(layers, split), split))
        if measured[-1][0] <= limit:
            break
    limit = max(limit, min(reached for reached, _ in measured))
    good = [split for reached, split in measured if reached <= limit]
    good = [_reduce_traffic(layers, split, limit) if isinstance(split, Split) else split for split in good]
    return min(good, key=lambda split: tokens_moved(layers, split))


def balance(layers: Layers, layout: Chunks) -> float:
    """Maximum work of a rank over the mean."""
    work = np.bincount(layout.owner, chunk_work(layers, layout.edges), layout.cp)
    return float(work.max() / work.mean()) if work.any() else 1.0


def tokens_moved(layers: Layers, layout: Chunks) -> int:
    """Tokens whose keys and values move, counted once for each rank that reads them and each layer."""
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

    In every round each rank gets one chunk: the rank with the least work so far gets the chunk with the most. The chunks of
    a round have the same size, so that token counts are equal; at most one round mixes the two sizes.
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


def _equalize_work(layers: Layers, cp: int, per_rank: int, limit: float) -> Split:
    """Longest first, then swaps of equally large chunks between the busiest rank and others, until `limit` is reached."""
    edges = np.arange(cp * per_rank + 1) * _tokens(layers) // (cp * per_rank)
    size, work = np.diff(edges), chunk_work(layers, edges)
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
    return Split(edges, owner, cp)


def _reduce_traffic(layers: Layers, split: Split, limit: float) -> Split:
    """The split after swaps of equally large chunks that reduce traffic. No rank exceeds `limit` or the present maximum."""
    if split.cp == 1 or len(split.owner) > MAX_CHUNKS:
        return split
    size, work = np.diff(split.edges), chunk_work(layers, split.edges)
    swaps = _Swaps(split, work, _traffic(layers, split.edges))
    ceiling = max(limit * swaps.load.mean(), swaps.load.max())
    for _ in range(ROUNDS):
        a, b, gain = swaps.candidates()
        more = work[b] - work[a]
        light = (swaps.load[swaps.owner[a]] + more <= ceiling) & (swaps.load[swaps.owner[b]] - more <= ceiling)
        good = np.flatnonzero(light & (size[a] == size[b]) & (gain > 0))
        if not len(good):
            break
        # Swaps between different pairs of ranks do not change each other's gain, so a round makes the best of them together.
        used: set[int] = set()
        for pair in good[np.argsort(-gain[good], kind="stable")[: 8 * split.cp]].tolist():
            ranks = {int(swaps.owner[a[pair]]), int(swaps.owner[b[pair]])}
            if not used & ranks:
                used |= ranks
                swaps.make(int(a[pair]), int(b[pair]), int(more[pair]))
    return Split(split.edges, swaps.owner, split.cp)


class _Swaps:
    """Owners of chunks while chunks are swapped, and the traffic between chunks and ranks.

    traffic: int64 [chunks, chunks], see `_traffic`. `_with_rank` int64 [chunks, cp] is the traffic of each chunk with all
    chunks of each rank.
    """

    def __init__(self, split: Split, work: Ints, traffic: Ints):
        self.owner = split.owner.copy()
        self.load = np.bincount(split.owner, work, split.cp).astype(np.int64)
        self._traffic = traffic
        self._with_rank = np.stack([self._traffic[:, self.owner == rank].sum(1) for rank in range(split.cp)], axis=1)
        self._per_rank = len(self.owner) // split.cp
        self._ranks = int(np.clip(PAIRS // (len(self.owner) * self._per_rank), 1, split.cp - 1)) if split.cp > 1 else 0

    def candidates(self) -> tuple[Ints, Ints, Ints]:
        """Possible swaps (chunk, other chunk, gain): of each chunk with all chunks of the ranks with most traffic to it.

        The gain is the traffic between ranks that the swap saves.
        """
        chunks, owner = np.arange(len(self.owner)), self.owner
        gain = self._with_rank - self._with_rank[chunks, owner][:, None]
        gain[chunks, owner] = -1 << 60
        targets = np.argpartition(-gain, self._ranks - 1, axis=1)[:, : self._ranks]
        members = np.argsort(owner, kind="stable").reshape(-1, self._per_rank)
        b = members[targets].reshape(-1)
        a = np.repeat(chunks, self._ranks * self._per_rank)
        return a, b, gain[a, owner[b]] + gain[b, owner[a]] - 2 * self._traffic[a, b]

    def make(self, a: int, b: int, more: int) -> None:
        """Swaps chunks `a` and `b`, after which the rank of `a` has `more` work than before."""
        one, other = self.owner[a], self.owner[b]
        change = self._traffic[:, b] - self._traffic[:, a]
        self._with_rank[:, one] += change
        self._with_rank[:, other] -= change
        self.load[one] += more
        self.load[other] -= more
        self.owner[a], self.owner[b] = other, one


def _traffic(layers: Layers, edges: Ints) -> Ints:
    """Keys that two chunks read of each other, symmetric int64 [chunks, chunks], in 1/64 tokens.

    A rank fetches a chunk once, however many of its chunks read it. So the tokens of a chunk count for less the more
    chunks read it.
    """
    chunks = len(edges) - 1
    total = np.zeros((chunks, chunks), np.int64)
    for mask, count in layers:
        tiles, query_chunk, key_chunk = split_at_edges(mask.pieces, edges)
        group, start, end = union(query_chunk * chunks + key_chunk, tiles.k0, tiles.k1)
        reads = np.bincount(group, end - start, chunks * chunks).astype(np.int64).reshape(chunks, chunks)
        np.fill_diagonal(reads, 0)
        total += count * (reads * 64 // np.maximum((reads > 0).sum(0), 1))
    return total + total.T


def _tokens(layers: Layers) -> int:
    return layers[0][0].n
