"""The proof of a plan, before it runs. It imports no function that makes plans: it reads their
numbers (`cp_ring.plan.records`), the chunks of the layout and the pieces of the mask.

The shards of all ranks lie end to end on one axis. Each token has one place there, and the place is
its name: in every buffer of every rank, tokens are named by their places.

Sums of random numbers compare sets of pairs. Each key gets a random number of 64 bits. For each
query, the numbers of the keys that all tiles compute are added up, and so are those of the keys
that the mask allows. Equal sums mean the same keys, each as often: a wrong plan passes with a
probability of about n * 2^-64. A tile without a band adds one difference of running sums to all of
its queries, a band adds one to each.

| function         | statement                                                                    |
|------------------|------------------------------------------------------------------------------|
| `verify`         | Tables of all ranks. Every pair that the mask allows is computed exactly     |
|                  | once, and no other is. A tile's keys are the rank's own or arrive at its     |
|                  | hop; nothing else arrives; a sender holds what it sends. Their gradients     |
|                  | leave that hop once and reach the keys' owner.                               |
|                  | Tables of one rank's part. The same of its queries and its messages, and     |
|                  | every pair of its keys, whoever computes it, is computed exactly once.       |
| `check_rank_plan`| What a rank runs moves the tokens of the tables, in their order, and its     |
|                  | tiles read the keys of the mask, in forward and in backward.                 |
| `check_order`    | A rank posts its messages in the one order that all ranks share, from slots  |
|                  | that are filled and into slots that are free. So the earliest message that   |
|                  | is not complete has both ends posted, and completes: no deadlock.            |
| `check_work`     | Kernel calls compute the pairs of the tiles. Each row of each partial result |
|                  | is added once, to the total of its token, and totals are complete.           |
| `check_moves`    | An exchange or a roll brings each token to its place.                        |

If each rank proves its own part, all ranks together are proven: both ends of a message then carry
the keys that the mask lets the receiver's queries see. Nothing is allocated for each pair of query
and key. That kernels and transports do what they are told is not proven here; the certificate tests
it on the running job. A violation is a `PlanError` that names the rank, the hop and the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.records import (
    OPEN,
    Call,
    Hop,
    Ints,
    PlanTables,
    RankPlan,
    Transfers,
    Turn,
    Update,
)

if TYPE_CHECKING:
    from cp_ring.plan.layout import Layout
    from cp_ring.plan.moves import Moves

Numbers = NDArray[np.uint64]

BLOCK = 1 << 16
"""The queries of bands that are added up at one time, so that their arrays stay in the cache."""


def verify(plan: PlanTables, axis: Axis | None = None) -> None:
    """Prove tables. `axis` is that of the layout, if it is known already."""
    axis = axis or Axis(plan.layout)
    _check_columns(plan, axis)
    _check_hops(plan)
    _check_pieces(plan)
    _check_cover(plan, axis)
    _check_moved(plan, axis)
    if (back := plan.of_backward) is not None:
        same = (back.mask, back.layout, back.part) == (plan.mask, plan.layout, plan.part)
        alone = same and not len(plan.gradients)
        _expect(alone, "backward has another mask or layout than forward, or not all gradients")
        verify(back, axis)


class Axis:
    """The places of all tokens of a layout.

    first: int64 [cp + 1], where the shard of each rank begins, and the end.
    token: int64 [n], the token of the stream at each place.
    """

    def __init__(self, layout: Layout):
        edges, owner, self.n = layout.edges, layout.owner, layout.n
        size = np.diff(edges)
        whole = len(size) == len(owner) and edges[0] == 0 and edges[-1] == self.n
        _expect(
            whole and (size > 0).all(),
            f"the edges of the layout's {len(owner)} chunks do not go up from 0 to {self.n}",
        )
        for rank in owner[(owner < 0) | (owner >= layout.cp)][:1]:
            raise PlanError(
                f"the layout has a chunk of rank {rank}, but ranks are 0 to {layout.cp - 1}"
            )
        # a shard holds its chunks in ascending order
        chunk = np.argsort(owner, kind="stable")
        self.token = _numbers(edges[chunk], edges[chunk + 1])
        self.size = np.bincount(owner, size, layout.cp).astype(np.int64)
        self.first = np.append(0, np.cumsum(self.size))

    def rank(self, place: int) -> int:
        return int(np.searchsorted(self.first, place, "right")) - 1

    def named(self, place: int) -> str:
        """Return a place as people count it."""
        owner = self.rank(place)
        return f"token {place - self.first[owner]} of rank {owner}"

    def own(self, rank: int) -> Ints:
        """Return the places of a rank's shard."""
        return np.arange(self.first[rank], self.first[rank + 1])

    def places(self, rows: Transfers) -> Ints:
        """Return the places of the tokens of messages, one message after another."""
        first = self.first[rows.owner]
        return _numbers(first + rows.start, first + rows.end)

    @cached_property
    def number(self) -> Numbers:
        """The random number of the key at each place."""
        return _random(self.n, self.n)

    @cached_property
    def sums(self) -> tuple[Numbers, Numbers]:
        """The running sums of the numbers, by token of the stream and by place."""
        stream = np.empty_like(self.number)
        stream[self.token] = self.number
        return _running(stream), _running(self.number)


def _expect(good: object, message: str) -> None:
    if not good:
        raise PlanError(message)


def _first(wrong: NDArray[np.bool_]) -> list[int]:
    """Return the first place that is wrong, or nothing."""
    return np.flatnonzero(wrong)[:1].tolist()


def _numbers(start: Ints, end: Ints) -> Ints:
    """Return for each i the numbers from start[i] up to end[i]."""
    count = end - start
    numbers: Ints = np.repeat(end - np.cumsum(count), count)
    numbers += np.arange(len(numbers))
    return numbers


def _spread(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return pairs (i, number) for `_numbers`."""
    return np.repeat(np.arange(len(start)), end - start), _numbers(start, end)


def _random(count: int, seed: int) -> Numbers:
    return np.random.Generator(np.random.SFC64(seed)).integers(
        0, (1 << 64) - 1, count, np.uint64, endpoint=True
    )


def _running(number: Numbers) -> Numbers:
    """Return the sum of the numbers before each place, and that of all."""
    sums = np.zeros(len(number) + 1, np.uint64)
    np.cumsum(number, out=sums[1:])
    return sums


def sums_of(
    tiles: Ints, rows: Ints | int, columns: Ints | int, before: Numbers, count: int
) -> Numbers:
    """Return the sum of the numbers of the keys that tiles let each of `count` queries see.

    Tile i, a column of `tiles` [6, tiles], counts its queries from `rows[i]`, and its keys from
    place `columns[i]` of the running sums `before`.
    """
    q0, q1, k0, k1, lo, hi = tiles
    rows, columns = np.broadcast_to(rows, q0.shape), np.broadcast_to(columns, q0.shape)
    change = np.zeros(count + 1, np.uint64)
    sloped = (lo != -OPEN) | (hi != OPEN)
    flat = np.flatnonzero(~sloped & (q0 < q1) & (k0 < k1))
    keys = before[(columns + k1)[flat]] - before[(columns + k0)[flat]]
    np.add.at(change, (rows + q0)[flat], keys)
    np.subtract.at(change, (rows + q1)[flat], keys)
    total: Numbers = np.cumsum(change, dtype=np.uint64)[:-1]
    bands = np.flatnonzero(sloped & (q0 < q1))
    ends = np.cumsum((q1 - q0)[bands])
    starts = ends - (q1 - q0)[bands]
    for begin in range(0, int(ends[-1]) if len(ends) else 0, BLOCK):
        first, last = np.searchsorted(ends, [begin, begin + BLOCK - 1], "right")
        near = slice(first, last + 1)
        parts = np.diff(np.minimum(ends[near], begin + BLOCK), prepend=begin)
        tile = np.repeat(bands[near], parts)
        query = np.arange(begin, begin + len(tile)) + np.repeat((q0[bands] - starts)[near], parts)
        start = np.maximum(k0[tile], query + lo[tile])
        end = np.maximum(np.minimum(k1[tile], query + hi[tile] + 1), start)
        column = columns[tile]
        np.add.at(total, rows[tile] + query, before[column + end] - before[column + start])
    return total


def _check_columns(plan: PlanTables, axis: Axis) -> None:
    """Ranks, hops and tokens exist, tables are sorted, and a tile has no query without a key and no
    key without a query.
    """
    cp = plan.cp
    q0, q1, k0, k1, lo, hi = plan.tiles.data
    ranks = np.stack([plan.tile_rank, plan.tile_hop, plan.tile_source])
    known = ((ranks >= 0) & (ranks < cp)).all(0)
    live = (q0 >= 0) & (k0 >= 0) & (q0 < q1) & (k0 < k1) & (lo <= hi)
    live &= (q0 >= k0 - hi) & (q1 <= k1 - lo) & (k0 >= q0 + lo) & (k1 <= q1 + hi)
    for i in _first(~(known & live)):
        raise PlanError(f"{_tile(plan, i)}: its ranks or tokens are not there, or see nothing")
    for i in _first((q1 > axis.size[plan.tile_rank]) | (k1 > axis.size[plan.tile_source])):
        raise PlanError(f"{_tile(plan, i)}: tokens outside the shards")
    for name, rows, holder in (
        ("transfers", plan.transfers, plan.transfers.receiver),
        ("gradients", plan.gradients, plan.gradients.sender),
    ):
        ranks = np.stack([rows.hop, rows.sender, rows.receiver, rows.owner, rows.buffer])
        good = ((ranks >= 0) & (ranks < cp)).all(0) & (rows.hop > 0)
        good &= rows.sender != rows.receiver
        for i in _first(~good):
            raise PlanError(f"{_moves(rows, i)}: there is no such message")
        for i in _first(
            (rows.start < 0) | (rows.start >= rows.end) | (rows.end > axis.size[rows.owner])
        ):
            raise PlanError(f"{_moves(rows, i)}, which has {axis.size[rows.owner[i]]}")
        ascends = _ascend(holder, rows.hop, (holder - rows.owner) % cp, rows.start)
        _expect(ascends, f"{name} are not sorted by their rank, hop, distance and start")
    _expect(_ascend(plan.tile_rank, plan.tile_hop), "tiles are not sorted by rank and hop")


def _ascend(*keys: Ints) -> bool:
    """Return True if entries are sorted by the keys, the most significant first."""
    tied = np.ones(max(len(keys[0]) - 1, 0), bool)
    for key in keys:
        step = np.diff(key)
        if (step[tied] < 0).any():
            return False
        tied &= step == 0
    return True


def _check_hops(plan: PlanTables) -> None:
    """A rank uses the keys of an owner at the hop of the schedule alone, at hop 0 its own alone. A
    sender holds the keys that it sends, and gradients go where their total is.
    """
    hops, cp, keys, grads = np.array(plan.schedule), plan.cp, plan.transfers, plan.gradients
    steps = np.diff(hops)
    good = len(hops) == cp and hops[0] == 0 and ((steps == 0) | (steps == 1)).all()
    _expect(good and 0 not in hops[1:], f"schedule {plan.schedule}: not one of {cp} ranks")
    held = np.where(keys.buffer == 0, keys.sender == keys.owner, keys.buffer == keys.hop - 1)
    for i in _first(~held):
        raise PlanError(f"{_moves(keys, i)}, which it does not have")
    home = np.where(grads.buffer == 0, grads.receiver == grads.owner, grads.buffer == grads.hop + 1)
    for i in _first(~home):
        raise PlanError(f"{_moves(grads, i)}, where its gradients have no place")
    on, back = keys[keys.buffer > 0], grads[grads.buffer > 0]
    for rank, owner, hop in (
        (plan.tile_rank, plan.tile_source, plan.tile_hop),
        (keys.receiver, keys.owner, keys.hop),
        (on.sender, on.owner, on.buffer),
        (grads.sender, grads.owner, grads.hop),
        (back.receiver, back.owner, back.buffer),
    ):
        due = hops[(rank - owner) % cp]
        for i in _first(due != hop):
            raise PlanError(
                f"rank {rank[i]}, hop {hop[i]}: keys of rank {owner[i]}, which belong to hop "
                f"{due[i]}"
            )


def _check_pieces(plan: PlanTables) -> None:
    """The pieces of the mask lie in the stream, and no two of them share a pair."""
    data, n = plan.mask.pieces.data, plan.layout.n
    data = data[:, (data[0] < data[1]) & (data[2] < data[3]) & (data[4] <= data[5])]
    inside = (data[[0, 2]] >= 0).all(0) & (data[[1, 3]] <= n).all(0)
    for i in _first(~inside):
        raise PlanError(
            f"the mask is for {n} tokens, but its piece {_piece(data[:, i])} lies outside"
        )
    if (pair := overlapping(data)) is not None:
        shown = " and ".join(str(_piece(data[:, which])) for which in pair)
        raise PlanError(f"the mask has pairs twice: its pieces {shown} overlap")


def overlapping(pieces: Ints) -> tuple[int, int] | None:
    """Return the indices of two pieces [6, pieces] that share a pair, or None if there are none.

    Pieces that share a query are compared at the first and the last query of each strip between two
    cuts. There both ends of each piece's keys are linear, so pieces that are apart and in one order
    at both are apart between them.
    """
    q0, q1, k0, k1, lo, hi = pieces
    turns = [np.clip(at - bound, q0, q1) for at in (k0, k1) for bound in (lo, hi)]
    cuts = np.unique(np.concatenate([q0, q1, *turns]))
    piece, strip = _spread(np.searchsorted(cuts, q0), np.searchsorted(cuts, q1))
    sides = []
    for query in (cuts[strip], cuts[strip + 1] - 1):
        start = np.maximum(k0[piece], query + lo[piece])
        sides += [start, np.minimum(k1[piece], query + hi[piece] + 1)]
    seen = (sides[0] < sides[1]) | (sides[2] < sides[3])
    order = np.flatnonzero(seen)[np.lexsort((sides[2][seen], sides[0][seen], strip[seen]))]
    one, other = order[:-1], order[1:]
    clash = (sides[1][one] > sides[0][other]) | (sides[3][one] > sides[2][other])
    for i in _first((strip[one] == strip[other]) & clash):
        low, high = sorted(piece[[one[i], other[i]]].tolist())
        return low, high
    return None


def _check_cover(plan: PlanTables, axis: Axis) -> None:
    """Every pair that the mask allows is computed exactly once, and no other is: all pairs, or
    those of a rank's queries and of its keys, which are the queries of turned tiles.
    """
    stream, places = axis.sums
    tiles, pieces = plan.tiles.data, plan.mask.pieces.data
    if plan.part is None:
        rows, columns = axis.first[plan.tile_rank], axis.first[plan.tile_source]
        computed = sums_of(tiles, rows, columns, places, axis.n)
        allowed = sums_of(pieces, 0, 0, stream, axis.n)[axis.token]
        _check_sums(axis, np.arange(axis.n), computed, allowed)
        return
    own = axis.own(plan.part)
    for what, others, mine, other in (
        ("query", "keys", plan.tile_rank, plan.tile_source),
        ("key", "queries", plan.tile_source, plan.tile_rank),
    ):
        if what == "key":
            tiles, pieces = _turned(tiles), _turned(pieces)
        tile = np.flatnonzero(mine == plan.part)
        computed = sums_of(tiles[:, tile], 0, axis.first[other[tile]], places, len(own))
        _check_sums(axis, own, computed, _allowed(pieces, axis, own), what, others)


def _check_sums(
    axis: Axis,
    own: Ints,
    computed: Numbers,
    allowed: Numbers,
    what: str = "query",
    others: str = "keys",
) -> None:
    for i in _first(computed != allowed):
        rank, token = axis.rank(own[i]), axis.token[own[i]]
        raise PlanError(f"rank {rank}: {what} {token} computes other {others} than the mask allows")


def _turned(tiles: Ints) -> Ints:
    """Return tiles whose queries are the keys of `tiles`, and the reverse."""
    q0, q1, k0, k1, lo, hi = tiles
    return np.stack([k0, k1, q0, q1, -hi, -lo])


def _allowed(pieces: Ints, axis: Axis, own: Ints) -> Numbers:
    """Return the sum of the numbers of the keys that pieces let each query of a shard see. They are
    cut by the chunks of the shard.
    """
    token = axis.token[own]
    begin = np.flatnonzero(np.diff(token, prepend=-2) != 1)
    start = token[begin]
    end = start + np.diff(begin, append=len(token))
    first = np.searchsorted(end, pieces[0], "right")
    piece, chunk = _spread(first, np.maximum(np.searchsorted(start, pieces[1]), first))
    parts = pieces[:, piece]
    parts[0] = np.maximum(parts[0], start[chunk])
    parts[1] = np.minimum(parts[1], end[chunk])
    return sums_of(parts, (begin - start)[chunk], 0, axis.sums[0], len(own))


def _check_moved(plan: PlanTables, axis: Axis) -> None:
    """A rank receives the keys that its tiles read and that it passes on, each once, and no others.
    By induction over hops, every key that is passed on was sent by its owner before. The gradients
    of the keys that its tiles read, and those that arrive to be passed on, leave it once. By
    induction from the last hop to the first, they reach the owner.
    """
    away, width = np.flatnonzero(plan.tile_hop > 0), axis.n + 1
    for rows, holder, passer, wants, moves, verb in (
        (plan.transfers, "receiver", "sender", "needs", "receives", "arrive"),
        (plan.gradients, "sender", "receiver", "makes gradients of", "sends gradients of", "leave"),
    )[: 1 + (plan.of_backward is None)]:
        passed = rows[rows.buffer > 0]
        rank = np.concatenate([plan.tile_rank[away], getattr(passed, passer)])
        base = rank * width + axis.first[np.concatenate([plan.tile_source[away], passed.owner])]
        start = np.concatenate([plan.tiles.data[2, away], passed.start])
        end = np.concatenate([plan.tiles.data[3, away], passed.end])
        wanted = _joined(base + start, base + end)
        base = getattr(rows, holder) * width + axis.first[rows.owner]
        start, end = base + rows.start, base + rows.end
        order = np.argsort(start)
        for i in _first(start[order][1:] < np.maximum.accumulate(end[order])[:-1]):
            whose, place = divmod(int(start[order][1 + i]), width)
            raise PlanError(f"rank {whose}: {axis.named(place)} and more {verb} twice")
        for number in _difference_of(wanted, _joined(start, end)):
            whose, place = divmod(number, width)
            hop = plan.schedule[(whose - axis.rank(place)) % plan.cp]
            raise PlanError(
                f"rank {whose}, hop {hop} {wants} other tokens than it {moves}, from "
                f"{axis.named(place)} on"
            )


def _joined(start: Ints, end: Ints) -> Ints:
    """Return the union of ranges, int64 [2, ranges]: start and end."""
    # A start is an even number and an end an odd one, so that where ranges touch, one begins before
    # the other ends, and they are joined.
    edge = np.sort(np.concatenate([2 * start, 2 * end + 1]))
    last = np.flatnonzero(np.cumsum(1 - 2 * (edge & 1)) == 0)
    first = np.append(0, last + 1)[: len(last)]
    return np.stack([edge[first], edge[last]]) >> 1


def _difference_of(one: Ints, other: Ints) -> list[int]:
    """Return the smaller number of the first row, where two tables differ first, or nothing."""
    if np.array_equal(one, other):
        return []
    count = min(one.shape[1], other.shape[1])
    at = int(np.append((one[:, :count] != other[:, :count]).any(0), True).argmax())
    return [min(int(table[0, at]) for table in (one, other) if at < table.shape[1])]


def check_rank_plan(plan: PlanTables, part: RankPlan, axis: Axis | None = None) -> None:
    """Prove the plan of one rank, as the executor runs it, against tables that are proven.

    The buffers of a hop hold the tokens of the rank's rows, one row after another. Messages must
    carry the tokens of their rows, in order; the gradients of a tile's keys must go to the same
    tokens; and the tiles must read the keys of the mask, as in `_check_cover`.
    """
    axis, rank = axis or Axis(plan.layout), part.member
    own = axis.own(rank)
    allowed = _allowed(plan.mask.pieces.data, axis, own)
    _expect(part.num_tokens == len(own), f"rank {rank}: has not {part.num_tokens} tokens")
    ascend = (np.diff([hop.index for hop in part.hops]) > 0).all()
    _expect(ascend, f"rank {rank}: its hops do not ascend")
    arriving, leaving = (
        plan.transfers[plan.transfers.receiver == rank],
        plan.gradients[plan.gradients.sender == rank],
    )
    keys, back = _filled(axis, arriving, own), plan.of_backward
    _expect((back is None) == (part.back is None), f"rank {rank}: its backward has other hops")
    grads = keys if back is not None else _filled(axis, leaving, own)
    for name, rows_of, peer, buffers in (
        ("receives", arriving, "sender", keys),
        ("sends", plan.transfers[plan.transfers.sender == rank], "receiver", keys),
        ("grad_sends", leaving, "receiver", grads),
        ("grad_receives", plan.gradients[plan.gradients.receiver == rank], "sender", grads),
    ):
        _check_messages(part, axis, name, rows_of, peer, buffers)
    if back is not None:
        check_rank_plan(back, replace(part, hops=part.back or (), back=None), axis)
    for hops in (part.hops, part.backward)[: 1 + (back is None)]:
        sums = np.zeros(len(own), np.uint64)
        for hop in hops:
            held, home = keys.get(hop.index, own[:0]), grads.get(hop.index, own[:0])
            _check_buffers(f"rank {rank}, hop {hop.index}", hop, held, home)
            sums += sums_of(hop.tiles.data, 0, 0, _running(axis.number[held]), len(own))
        _check_sums(axis, own, sums, allowed)


def _filled(axis: Axis, rows: Transfers, own: Ints) -> dict[int, Ints]:
    """Return the places of the tokens of each hop's buffer: those of the hop's rows, in order."""
    places, hop = axis.places(rows), np.repeat(rows.hop, rows.end - rows.start)
    first = np.flatnonzero(np.diff(hop, prepend=0))
    parts = np.split(places, first[1:])
    return {0: own} | dict(zip(hop[first].tolist(), parts, strict=False))


def _check_messages(
    part: RankPlan, axis: Axis, name: str, rows: Transfers, peer: str, buffers: Mapping[int, Ints]
) -> None:
    """The messages of one kind carry the tokens of their rows, in order, hop by hop and peer by
    peer.
    """
    with_peer, cp = getattr(rows, peer), len(axis.size)
    order = np.lexsort((with_peer, rows.hop))
    rows, pair = rows[order], (rows.hop * cp + with_peer)[order]
    wanted = np.stack([np.repeat(pair, rows.end - rows.start), axis.places(rows)])
    found = [(-1, axis.token[:0])]
    for hop in part.hops:
        for transfer in getattr(hop, name):
            # receives fill and grad_sends leave the hop's own buffer; others name theirs
            own_hop = name in ("receives", "grad_sends")
            held = buffers.get(hop.index if own_hop else transfer.buffer, axis.token[:0])
            where = f"rank {part.member}, hop {hop.index}: {name} with rank {transfer.peer}"
            _expect(0 <= transfer.peer < cp, f"{where}, which is not there")
            for start, end in transfer.ranges:
                inside = 0 <= start < end <= len(held)
                _expect(inside, f"{where}: tokens {start}..{end} are outside of the buffer")
                found.append((hop.index * cp + transfer.peer, held[start:end]))
    found.sort(key=lambda each: each[0])
    pairs, places = zip(*found, strict=True)
    moved = np.stack([np.repeat(pairs, [*map(len, places)]), np.concatenate(places)])
    for number in _difference_of(wanted, moved):
        index, other = divmod(number, cp)
        raise PlanError(
            f"rank {part.member}, hop {index}: {name} with rank {other} has other tokens than the "
            "tables"
        )


def _check_buffers(where: str, hop: Hop, held: Ints, back: Ints) -> None:
    """A hop's buffers have the sizes of what arrives and leaves, and the gradients of each tile's
    keys go to the same tokens.
    """
    tiles = hop.tiles.data
    sizes = (hop.num_keys, hop.num_grads) == (len(held), len(back))
    _expect(sizes, f"{where}: its buffers have other sizes than its messages")
    first, end = tiles[2] + hop.grad_shift, tiles[3] + hop.grad_shift
    inside = (tiles[2] >= 0) & (tiles[3] <= len(held)) & (first >= 0) & (end <= len(back))
    for i in _first(~inside):
        raise PlanError(f"{where}: tile {_piece(tiles[:, i])} is outside of the buffers")
    if hop.grad_shift.any() or not np.array_equal(held, back):
        tile, key = _spread(tiles[2], tiles[3])
        for i in _first(held[key] != back[key + hop.grad_shift[tile]]):
            raise PlanError(
                f"{where}: gradients of tile {_piece(tiles[:, tile[i]])} go to other tokens than "
                "its keys"
            )


def check_order(turns: Sequence[Turn], part: RankPlan, num_slots: int, backward: bool) -> None:
    """Prove when a rank posts its messages, from the hops of a pass in their order.

    The order that all ranks share: keys of hop t before those of hop t + 1; gradients of hop t
    after keys of hop t + a, and before those of hop t + a + 1. Here a is `num_slots` - 1, or 1 on a
    route that forwards.
    """
    rank, ahead = part.member, 1 if part.forwards else num_slots - 1
    hops = part.backward if backward else part.hops
    _expect([turn.hop for turn in turns] == [*hops], f"rank {rank}: an order of other hops")
    posted, slots = 0, {0: 0}
    for place, turn in enumerate(turns):
        now = turn.hop.index
        for new in turns[posted : max(turn.ahead, place + 1)]:
            where = f"rank {rank}, hop {now}: the keys of hop {new.hop.index}"
            if new.hop.receives:
                free = 0 < new.slot <= num_slots and new.slot not in slots.values()
                _expect(free, f"{where} arrive in slot {new.slot}, which is not free")
                slots[new.hop.index] = new.slot
            for send, slot in new.sends:
                held = send.buffer <= now and slots.get(send.buffer) == slot
                _expect(held, f"{where} are sent from slot {slot}, where they are not yet")
            _expect(
                tuple(send for send, _ in new.sends) == tuple(new.hop.sends),
                f"{where} are other messages than the hop's",
            )
        posted = max(turn.ahead, place + 1)
        for number, other in enumerate(turns if backward and now else ()):
            moves = other.hop.index and (other.hop.receives or other.hop.sends)
            _expect(
                not moves or (number < posted) == (other.hop.index <= now + ahead),
                f"rank {rank}: the keys of hop {other.hop.index} are posted on the other side of "
                f"the gradients of hop {now} than on other ranks",
            )
        if now:
            slots.pop(now, None)


def check_work(
    rank: int,
    num_tokens: int,
    hops: Sequence[Hop],
    calls: Mapping[Hop, Sequence[Call]],
    queries: Sequence[Update],
    keys: Mapping[int, Sequence[Update]],
) -> None:
    """Prove the kernel calls and the updates of a pass of a rank, which holds `num_tokens` tokens,
    against the tiles of its plan.

    For each hop, the keys that the calls let each query see are those of the hop's tiles, by sums.
    Each row of a call's result has the token of its query, or of the gradient of its key; the
    updates must add each of them once to the total at that token, in the order in which calls and
    messages bring them. `keys` are those of backward by hop, empty in forward.
    """
    of_queries: list[Ints] = []
    of_keys: dict[int, list[Ints]] = defaultdict(list)
    arriving: list[tuple[int, Ints]] = []
    for hop in hops:
        number = _random(hop.num_keys, hop.index)
        tiles = hop.tiles.data
        wanted = sums_of(tiles, 0, 0, _running(number), num_tokens)
        home = np.full(hop.num_keys, -1)
        tile, key = _spread(tiles[2], tiles[3])
        home[key] = key + hop.grad_shift[tile]
        for call in calls[hop]:
            pairs = call.pairs()
            of_q, of_k = pairs.query_ends, pairs.key_ends
            none = np.zeros_like(pairs.lo)
            seen = np.stack([none, np.diff(of_q), none, np.diff(of_k), pairs.lo, pairs.hi])
            before = _running(number[pairs.keys])
            sums = sums_of(seen, of_q[:-1], of_k[:-1], before, len(pairs.queries))
            np.subtract.at(wanted, pairs.queries, sums)
            of_queries.append(pairs.queries)
            of_keys[hop.index].append(home[pairs.keys])
        for query in _first(wanted != 0):
            raise PlanError(
                f"rank {rank}, hop {hop.index}: kernel calls compute other keys of query {query} "
                "than the tiles"
            )
        for buffer, tokens in arriving:
            _expect(buffer in (0, hop.index), f"rank {rank}: gradients for hop {buffer} are late")
            of_keys[buffer].append(tokens)
        arriving = _arriving(hop)
    of_keys[0] += [tokens for _, tokens in arriving]
    _check_updates(f"rank {rank}: out", queries, of_queries, num_tokens)
    sizes = {hop.index: hop.num_grads for hop in hops} | {0: num_tokens}
    for index, updates in keys.items():
        where = f"rank {rank}, hop {index}: gradients of keys"
        _check_updates(where, updates, of_keys[index], sizes[index])


def _arriving(hop: Hop) -> list[tuple[int, Ints]]:
    """Return for each of the hop's messages of gradients the buffer whose total it is added to, and
    the token of each row. All lie end to end in one tensor; -1 marks the rows of other messages.
    """
    ranges = [(i, *ends) for i, each in enumerate(hop.grad_receives) for ends in each.ranges]
    message, start, end = np.array(ranges, np.int64).reshape(-1, 3).T
    which, token = _spread(start, end)
    return [
        (each.buffer, np.where(message[which] == i, token, -1))
        for i, each in enumerate(hop.grad_receives)
    ]


def _check_updates(name: str, updates: Sequence[Update], parts: Sequence[Ints], size: int) -> None:
    """Updates add each row of each part once, at its token of a total of `size` tokens. The first
    update of a token stores it, and the last one completes it. A part has a token for each row, -1
    for rows that are not its own.
    """
    left, stage = [*parts], np.zeros(size, np.int64)  # 1: a running total, 2: complete
    for update in updates:
        start, end, first, last = update.table[:4]
        _expect((start[1:] >= end[:-1]).all(), f"{name}: an update has segments that overlap")
        which, token = _spread(start, end)
        good = np.where(first[which] == 1, 0, 1) == stage[token]
        for i in _first(~good):
            raise PlanError(
                f"{name}: token {token[i]} begins twice, or goes on without a beginning"
            )
        stage[token] = 1 + last[which]
        runs = np.flatnonzero((first == 0) | (last == 0))
        low, high, _ = update.kept.indices(size)
        kept = (start[runs] >= low) & (end[runs] <= high)
        _expect(kept.all(), f"{name}: a running total has no memory for all of its tokens")
        for position, step in zip(update.table[4::2], update.table[5::2], strict=True):
            _expect(left, f"{name}: an update waits for a part that does not come")
            part = left.pop(0)
            mine = np.flatnonzero((step != 0)[which])
            at = (position[which] + step[which] * (token - start[which]))[mine]
            same = len(at) == (part >= 0).sum() and (at >= 0).all() and (at < len(part)).all()
            same = same and np.array_equal(part[at], token[mine])
            _expect(same, f"{name}: an update adds rows of a part at other tokens, or not once")
            if update.whole:
                _expect(
                    np.array_equal(part, np.arange(size)), f"{name}: a part is not the whole total"
                )
    _expect(not left, f"{name}: {len(left)} partial results are never added")
    for i in _first(stage != 2):
        raise PlanError(f"{name}: token {i} is not complete after the last update")


def check_moves(
    moves: Moves, old: Axis, new: Axis, shift: int = 0, member: int | None = None
) -> None:
    """Prove that each place of each receiver's new tensor is filled once, by the right token: token
    i of the stream comes to the place of token (i + shift) mod n.

    old, new: the places of the ranks' tensors before and after. With `member`, the ranks are those
    of this member, and each of them will hold the shard of rank `member` of `new`.
    """
    sender, receiver, length = moves.sender, moves.receiver, moves.tokens
    wanted = np.arange(new.n)
    if member is not None:
        _expect((receiver == -1).all(), "moves: a range does not go to every rank")
        sender, receiver = sender + member * moves.ranks, np.full(len(sender), member)
        wanted = new.own(member)
    for axis, rank, start in ((old, sender, moves.source), (new, receiver, moves.target)):
        known = (rank >= 0) & (rank < len(axis.size))
        room = axis.size[np.where(known, rank, 0)]
        good = known & (length > 0) & (start >= 0) & (start + length <= room)
        for i in _first(~good):
            raise PlanError(f"moves: range {i} is outside of the shard of rank {rank[i]}")
    start, source = new.first[receiver] + moves.target, old.first[sender] + moves.source
    which, place = _spread(start, start + length)
    token = old.token[_numbers(source, source + length)]
    _expect(np.array_equal(np.sort(place), wanted), "moves: a place is filled twice, or not at all")
    for i in _first((token + shift - new.token[place]) % new.n != 0):
        raise PlanError(
            f"moves: token {token[i]} of rank {sender[which[i]]} goes to the place of token "
            f"{new.token[place[i]]}"
        )


def _tile(plan: PlanTables, i: int) -> str:
    q0, q1, k0, k1 = plan.tiles.data[:4, i]
    return (
        f"rank {plan.tile_rank[i]}, hop {plan.tile_hop[i]}: tile of queries {q0}..{q1}, keys "
        f"{k0}..{k1} of rank {plan.tile_source[i]}"
    )


def _moves(rows: Transfers, i: int) -> str:
    return (
        f"rank {rows.sender[i]}, hop {rows.hop[i]}: sends tokens {rows.start[i]}..{rows.end[i]} of "
        f"rank {rows.owner[i]} to rank {rows.receiver[i]}"
    )


def _piece(column: Ints) -> tuple[int, ...]:
    return tuple(column.tolist())
