"""The balanced layout: equal tokens for each rank, and of the splits with even work the one of
least predicted time; or zigzag or contiguous chunks with uneven work, if links between nodes are so
slow that these take much less time.

Tokens stay where they are from layer to layer. So the work and the time of a layout are the sums
over all layers, given as a list of masks, each with the number of layers that have it.

The stream is cut where the mask begins another row structure, such as a document. Short runs stay
whole. A piece with more than a share of a part's work is cut further, so that few tokens with much
work (global tokens, a document that sees all) are cut fine and others are not. Pieces go to parts
by longest processing time first, and the excess over the tokens of a part is cut off. Then pieces
of the busiest part are exchanged for as many tokens of the idlest. All this is done first for
nodes, then for halves of each, down to the ranks: so documents stay where links are fast, and the
parts are balanced as a whole where neighboring ranks exchange heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import batched, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, overlaps, runs, starts_of
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.plan.shard_tiles import shard_tiles
from cp_ring.plan.tiles import Tiles, cut
from cp_ring.plan.time import BLOCK, Conditions, Traffic

Floats = NDArray[np.float64]


# The numbers that decide how splits are made and which one is taken. Beside each: what others
# change in the time of 125 cells of tests/longca by the formula, in percent, the mean and the most.

GOOD = 1.05  # 1.02: +0.05, +11; 1.1: +0.02, +3
"""Maximum over mean work; of the layouts that reach it, the fastest is taken."""

ENOUGH, LOOSE = 1.005, 1.02
"""Exchanges end at this maximum over mean. `LOOSE` is for fewer pieces (1.005: -0.05, +3; 1.04:
+0.13, +5); `ENOUGH` is smaller than `GOOD` because parts of parts are uneven too (1.001: +0.03, +4;
1.02: +0.05, +3).
"""

SHARES = (1.0, 0.5)  # one: +1.1, +18; and 0.25: -0.12, 0
COARSE = 2.0  # without: -0.06, +2
"""The largest share of a part's work that a piece may hold, in the splits that are compared;
`COARSE` for up to two nodes, where a split takes little time to make.
"""

GRID = 4  # 2: +0.07, +13; 8: +0.09, +13
"""The chunks of each rank in an even grid, which is tried there too."""

NEAR = 1.02  # 1: -0.04, 0; 1.1: +0.4, +8
"""A split at most this many times as slow as one kernel call ends the search."""

ALMOST = 1.005  # 1: +0.04, +3; 1.02: +0.24, +7
"""Of splits whose times differ by less, the simplest is taken."""

WORTH = 0.9  # 0: 0, 0; 1: +0.04, +2
"""An even split may have uneven work if it takes at most this much of the time of others."""

FINEST = 16  # 1: 0, 0; 128: -0.07, 0
"""The tokens of the shortest piece of a cut."""

RUNS = 16  # 4: +1.1, +34; 64: -0.45, +10, and 1.15 times the chunks
"""The runs of short documents in a part."""

PLACES = 64  # 16: +0.14, +12; 256: +0.01, +7
"""The places of a rank where its work is measured."""

ALIKE = 3  # 1: +0.85, +23; 100: +0.02, +3
"""Rows are alike if none sees more than this many times the keys of another."""

ALIGNED = 8 * BLOCK  # 2: +0.03, +5; never: -0.12, +21
"""Pieces of so many tokens are cut between blocks."""

EXCHANGES = 8  # 2: 0, +0.6; 32: 0, 0
"""The most exchanges, for each part."""

BEYOND = 1.1  # 1: +0.01, +7; 1.5: +0.06, +5
"""An exchange may gain this many times what is wanted."""

Layers = Sequence[tuple[Mask, int]]
"""Masks of one length, and the number of layers that have each mask."""


Range = tuple[int, int]


class Work(NamedTuple):
    """The total work of queries before each of some tokens: float64 [edges] twice; linear between
    the tokens.
    """

    edge: Floats
    before: Floats

    def of(self, start: ArrayLike, end: ArrayLike) -> Floats:
        """Return the work of queries from each `start` to `end`."""
        before, after = np.interp([start, end], self.edge, self.before)
        return after - before


def balanced_layout(layers: Layers, cp: int) -> Layout:
    """Return the layout of `Layout.balanced`: zigzag or contiguous if tokens are even, or one that
    is made here.

    Raises `PlanError` if there are fewer tokens than ranks.
    """
    n = layers[0][0].n
    if n < cp:
        raise PlanError(
            f"balanced layout cuts the sequence into {cp} chunks for cp {cp}, but it has {n} tokens"
        )
    others = [make(n, cp) for make in (Layout.zigzag, Layout.contiguous)[n < 2 * cp :]]
    others = [split for split in others if np.ptp(split.tokens_per_rank) <= (n % cp > 0)]
    rows, work = _measured(layers, cp)
    sizes = tuple(n // cp + (rank < n % cp) for rank in range(cp))
    found: list[tuple[float, float, Layout]] = []
    good = [split for split in others if balance(layers, split) <= GOOD]
    ideal = 0.0
    for split in chain(
        good, (Layout(n, cp, *chunks, "balanced") for chunks in _deals(work, rows, sizes))
    ):
        even = max(GOOD, balance(layers, split))
        best, limit, *_ = min(found, key=lambda one: one[:2], default=(even, np.inf))
        if even > best:
            continue
        seconds, computing = _seconds(layers, split, ALMOST * limit if even == best else np.inf)
        ideal = ideal or computing
        found.append((even, seconds, split))
        if even == GOOD and seconds <= NEAR * ideal:
            break
    most, seconds, _ = min(found, key=lambda one: one[:2])
    worth = WORTH * seconds if cp > Conditions().node else 0.0
    for split in () if good else others:
        even = balance(layers, split)
        busiest = ideal * balance(layers, split.merged(Conditions().heads_to_try(cp)[-1]))
        if even <= most or busiest <= worth:
            found.append((even, _seconds(layers, split)[0], split))
    found = [(even if took > worth else 0.0, took, split) for even, took, split in found]
    even, seconds, _ = min(found, key=lambda one: one[:2])
    alike = [one for one in found if one[0] == even and one[1] <= ALMOST * seconds]
    return min(alike, key=lambda one: (one[2] not in others, len(one[2].owner), one[1]))[2]


def _deals(work: Work, rows: Ints, sizes: tuple[int, ...]) -> Iterator[tuple[Ints, Ints]]:
    """Yield the splits that are compared; few for many ranks, because they take long to make."""
    many = len(sizes) > 2 * Conditions().node
    for enough in (ENOUGH, LOOSE)[: 2 - many]:
        for share in (COARSE, *SHARES)[many:]:
            yield _deal(work, rows, sizes, share, enough)
    if many:
        return
    grid = np.unique(np.linspace(0, rows[-1], GRID * len(sizes) + 1).astype(np.int64))
    yield _deal(work, grid, sizes, np.inf, LOOSE)


def _seconds(layers: Layers, split: Layout, limit: float = np.inf) -> tuple[float, float]:
    """Return the seconds of forward and backward of all layers, each with its fastest number of
    ranks that exchange heads, or infinity if a layer takes more than `limit`; and the seconds in
    which all ranks would compute the same if their work were even and nobody waited.
    """
    total, computing, given = 0.0, 0.0, Conditions()
    for mask, count in layers:
        best, work = np.inf, 0
        for heads in reversed(given.heads_to_try(split.cp)):
            members = split.merged(heads)
            around = 2 * given.exchange(-(-mask.n // split.cp), heads)
            tiles, shards = shard_tiles(mask.pieces, members), members.tokens_per_rank
            traffic = Traffic(*tiles, shards, heads, given, _pairs_of_blocks)
            if traffic.bound + around < min(best, limit / count):
                best = min(best, traffic.fastest(SLOT_SHARDS)[1].both)
            work = int(traffic.pairs.sum())
        total += count * best
        computing += count * work / split.cp * sum(given.pair_seconds())
    return total, computing


def _pairs_of_blocks(tiles: Tiles) -> Ints:
    """Return the pairs that a kernel computes for each tile: whole blocks, and to begin each block,
    of queries in forward and of keys in backward, as much as one of its products.
    """
    queries, keys = tiles.q1 - tiles.q0, tiles.k1 - tiles.k0
    whole = -(-queries // BLOCK) * -(-keys // BLOCK) * BLOCK**2
    ragged = tiles.area() + BLOCK // 2 * (queries + keys)
    there, back = Conditions().sizes.pair_flops
    begin = BLOCK * (there * queries + back * keys) / (there + back)
    return np.where(tiles.banded, ragged, whole) + begin.astype(np.int64)


def balance(layers: Layers, layout: Layout) -> float:
    """Return the largest work of a rank over the mean."""
    load = np.bincount(layout.owner, chunk_work(layers, layout.edges), layout.cp)
    return float(load.max() / load.mean()) if load.any() else 1.0


def chunk_work(layers: Layers, edges: Ints) -> Floats:
    """Return the allowed pairs of each chunk's queries, summed over layers, float64 [chunks]."""
    work = np.zeros(len(edges) - 1)
    for mask, count in layers:
        tiles, _, chunk = cut(mask.pieces, edges)
        work += count * np.bincount(chunk, tiles.area(), len(work))
    return work


def _measured(layers: Layers, cp: int) -> tuple[Ints, Work]:
    """Return where the stream may be cut without a loss, with 0 and n; and the work of the
    stream.
    """
    n = layers[0][0].n
    starts = [edge for mask, _ in layers for edge in (mask.pieces.q0, mask.pieces.q1)]
    rows = np.unique(np.concatenate([[0, n], *starts]))
    edge = np.union1d(rows, np.arange(0, n, max(1, n // (cp * PLACES))))
    pairs = chunk_work(layers, edge)
    # Rows that continue the keys of the rows before them, and see about as many, are one part.
    first = np.full(len(rows), n)
    for mask, _ in layers:
        np.minimum.at(first, np.searchsorted(rows, mask.pieces.q0), mask.pieces.k0)
    keys = pairs / np.diff(edge)
    at = np.searchsorted(edge, rows[1:-1])
    alike = np.maximum(keys[at], keys[at - 1]) <= ALIKE * np.minimum(keys[at], keys[at - 1])
    goes_on = alike & (first[1:-1] < rows[1:-1])
    return rows[~np.pad(goes_on, 1)], Work(edge.astype(float), np.append(0.0, np.cumsum(pairs)))


def _deal(
    work: Work, segments: Ints, sizes: tuple[int, ...], share: float, enough: float
) -> tuple[Ints, Ints]:
    """Deal segments, tokens `[segments[i], segments[i + 1])`, to ranks of `sizes` tokens. No piece
    holds more than `share` of the work of a part. Exchanges end at `enough`. Returns the edges of
    the chunks and their owners.
    """
    held, ranks = [np.stack([segments[:-1], segments[1:]])], [sizes]
    while len(ranks[0]) > 1:
        parts: list[Ints] = []
        smaller: list[tuple[int, ...]] = []
        for pieces, of in zip(held, ranks, strict=True):
            rooms = [*batched(of, _part_of(len(of)))]
            parts += _parts(work, _split(pieces, segments), list(map(sum, rooms)), share, enough)
            smaller += rooms
        held, ranks = parts, smaller
    start = np.concatenate([part[0] for part in held])
    owner = np.repeat(np.arange(len(held)), [part.shape[1] for part in held])
    order = np.argsort(start)
    start, owner = start[order], owner[order]
    first, _ = runs(owner[1:] != owner[:-1], len(owner))
    return np.append(start[first], segments[-1]), owner[first]


def _part_of(ranks: int) -> int:
    """Return how many ranks each part gets when `ranks` ranks are split into parts: the ranks of a
    node, then halves.
    """
    near = Conditions().node
    if ranks > near and ranks % near == 0:
        return near
    return ranks // 2 if ranks % 2 == 0 else 1


def _parts(work: Work, pieces: Ints, rooms: list[int], share: float, enough: float) -> list[Ints]:
    """Deal the pieces to parts of `rooms` tokens each. Pieces are start and end, int64 [2,
    pieces].
    """
    if len(rooms) == 1:
        return [pieces]
    amounts = work.of(*pieces)
    mean = amounts.sum() / len(rooms)
    most = share * mean if mean else 0.0  # share may be infinite
    units = _units(work, _runs(amounts, pieces, max(rooms) // RUNS, mean / RUNS), most)
    flat = np.array([*chain(*units)], np.int64).T
    amounts = np.add.reduceat(work.of(*flat), starts_of(np.array([*map(len, units)])))
    load, room = [0.0] * len(rooms), list(rooms)
    parts: list[list[Range]] = [[] for _ in rooms]
    for index in np.argsort(-amounts, kind="stable").tolist():
        todo = [units[index]]
        while todo:
            unit = todo.pop()
            size = sum(end - start for start, end in unit)
            part = load.index(min(load))  # of all, then of those that it fits
            if room[part] < size:
                fits = [part for part, left in enumerate(room) if left >= size]
                part = min(fits or (x for x, left in enumerate(room) if left), key=load.__getitem__)
                if not fits and len(unit) > 1:
                    todo += [[piece] for piece in unit]
                    continue
                if not fits:
                    [(start, end)], size = unit, room[part]
                    unit = [(start, start + size)]
                    todo.append([(start + size, end)])
            parts[part] += unit
            whole = unit is units[index]
            load[part] += amounts[index] if whole else sum(float(work.of(*piece)) for piece in unit)
            room[part] -= size
    _even(work, parts, np.array(load), mean, enough)
    return [np.array(sorted(part), np.int64).reshape(-1, 2).T for part in parts]


def _split(pieces: Ints, segments: Ints) -> Ints:
    """Cut the pieces, which ascend, where segments begin, and long pieces of a segment that other
    parts have pieces of too in the middle. So both halves of a node send the keys that others need.
    """
    which, segment = overlaps(pieces[0], pieces[1], segments[:-1], segments[1:])
    start = np.maximum(pieces[0, which], segments[segment])
    end = np.minimum(pieces[1, which], segments[segment + 1])
    size = end - start
    shared = np.bincount(segment, size)[segment] < segments[segment + 1] - segments[segment]
    middle = (start + size // 2 // BLOCK * BLOCK)[shared & (size >= ALIGNED)]
    return np.sort([np.append(start, middle), np.append(end, middle)])


def _runs(amounts: Floats, pieces: Ints, size: int, most: float) -> Ints:
    """Join neighboring short pieces, of at most `most` of the `amounts` of work, into one piece."""
    start, end = pieces
    long = (end - start > size // 2) | (amounts > most)
    bucket = start // max(size, 1)
    apart = (start[1:] != end[:-1]) | long[1:] | long[:-1] | (bucket[1:] != bucket[:-1])
    first, last = runs(apart, len(start))
    return np.stack([start[first], end[last]])


def _units(work: Work, pieces: Ints, most: float) -> list[list[Range]]:
    """Return what is dealt as a whole: the pieces, and parts of each piece of more than `most`
    work. It is cut into as few equal parts as needed, of which the first and the last are a unit,
    then the second and the last but one, and so on: as in zigzag, units of a causal document have
    equal work.
    """
    amounts, units = work.of(*pieces), [[(start, end)] for start, end in pieces.T.tolist()]
    for index in np.flatnonzero(amounts > most).tolist():
        [(first, last)] = units[index]
        finest = max((last - first) // FINEST // 2, 1)
        count, largest, edges = 1, float(amounts[index]), np.array([first, last])
        while largest > 1.001 * most and count < finest:
            count = min(max(count + 1, int(count * largest / most)), finest)
            edges = np.linspace(first, last, 2 * count + 1).astype(np.int64)
            if (last - first) // count >= ALIGNED:
                edges[1:-1] = first + (edges[1:-1] - first) // BLOCK * BLOCK
            of = work.of(edges[:-1], edges[1:])
            largest = (of + of[::-1]).max()
        cuts = list(pairwise(edges.tolist()))
        units[index] = cuts[count - 1 : count + 1]
        units += [[cuts[place], cuts[-1 - place]] for place in range(count - 1)]
    return units


def _even(work: Work, parts: list[list[Range]], load: Floats, mean: float, enough: float) -> None:
    """Exchange the ends of pieces of the busiest part for the beginnings of equally long pieces of
    the idlest part, until no load is above `enough` of the mean: most masks show a query the keys
    before it, so ends hold more work.
    """
    for _ in range(EXCHANGES * len(parts)):
        top, low = int(load.argmax()), int(load.argmin())
        wanted = min(load[top] - mean, mean - load[low])
        if load[top] <= enough * mean:
            break
        pieces, mine = np.array(parts[top] + parts[low], np.int64).T, len(parts[top])
        size = pieces[1] - pieces[0]
        dense = work.of(*pieces) / size
        tokens = np.minimum(size[:mine, None], size[mine:])
        gain = tokens * (dense[:mine, None] - dense[mine:])
        # If a pair gains too much, only a part of it is exchanged, which cuts two more pieces; the
        # larger this part, the better.
        some = wanted * (0.5 - 0.2 * wanted / np.maximum(gain, wanted))
        miss = np.where(gain > BEYOND * wanted, some, abs(wanted - gain))
        one, two = np.unravel_index(int(miss.argmin()), miss.shape)
        count, reached = int(tokens[one, two]), gain[one, two]
        if reached <= 0:
            break
        (start, end), (begin, stop) = parts[top][one], parts[low][two]
        for _ in range(4):
            reached = np.subtract(*work.of([end - count, begin], [end, begin + count]))
            if reached <= BEYOND * wanted or count == 1:
                break
            count = max(1, int(count * wanted / reached))
            count = max(count // BLOCK, 1) * BLOCK if count > BLOCK else count
        if not 0 < reached < load[top] - load[low]:
            break
        load[top] -= reached
        load[low] += reached
        parts[top][one], parts[low][two] = (start, end - count), (begin + count, stop)
        parts[low].append((end - count, end))
        parts[top].append((begin, begin + count))
        for part in (top, low):
            parts[part] = [(start, end) for start, end in parts[part] if start < end]
