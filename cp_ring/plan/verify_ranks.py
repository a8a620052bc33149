"""The proof that the rows of a plan, as the executor runs them, do what a right plan does.

The messages of all ranks are matched by a simulation of their queues. Following the data through the matched messages
tells whose rows every buffer holds; with that the rows are turned back into tables, and the tables are proven.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan import verify
from cp_ring.plan.tables import Hop, PlanTables, RankPlan, Transfers
from cp_ring.plan.tiles import Tile, Tiles


class Message(NamedTuple):
    """One end of one message: rows `[start, end)` of a buffer of `rank`, to or from `peer`."""

    rank: int
    hop: int
    peer: int
    sends: bool
    buffer: int
    start: int
    end: int

    def __str__(self) -> str:
        verb = "sends to" if self.sends else "receives from"
        return f"rank {self.rank}, hop {self.hop}: {verb} rank {self.peer} rows {self.start}..{self.end} of buffer {self.buffer}"


Batch = list[Message]
Pairs = list[tuple[Message, Message]]


def verify_rank_plans(plan: PlanTables, rows: Sequence[RankPlan], num_slots: int = 2) -> None:
    """Proves that `rows`, one of each rank, compute `plan.mask`. Raises `PlanError`."""
    for row in rows:
        _check_row(row, int(plan.layout.tokens_per_rank[row.rank]))
    keys = simulate([forward_batches(row) for row in rows])
    simulate([backward_batches(row) for row in rows])
    grads = simulate([[batch for hop in row.hops if (batch := gradient_batch(hop, row.rank))] for row in rows])
    for hops in ([row.hops for row in rows], [row.backward for row in rows]):
        rebuilt = _rebuild(plan, rows, hops, keys, grads)
        for check in (verify.check_tables, verify.check_sources, verify.check_cover, verify.check_keys, verify.check_gradients):
            check(rebuilt)
        verify.check_slots(rebuilt, num_slots)


def key_batch(hop: Hop, rank: int) -> Batch:
    """The messages that are posted together before the hop before this one is computed."""
    sends = [Message(rank, hop.index, t.peer, True, t.buffer, *rows) for t in hop.sends for rows in t.ranges]
    if hop.receive is None:
        return sends
    return sends + [Message(rank, hop.index, hop.receive.peer, False, hop.index, *rows) for rows in hop.receive.ranges]


def gradient_batch(hop: Hop, rank: int) -> Batch:
    """The messages that are posted together once this hop is computed."""
    sends = [Message(rank, hop.index, t.peer, True, hop.index, *rows) for t in hop.grad_sends for rows in t.ranges]
    return sends + [Message(rank, hop.index, t.peer, False, t.buffer, *rows) for t in hop.grad_receives for rows in t.ranges]


def forward_batches(row: RankPlan) -> list[Batch]:
    """A rank's batches of messages in the order in which the forward pass posts them."""
    return [batch for hop in row.hops if (batch := key_batch(hop, row.rank))]


def backward_batches(row: RankPlan) -> list[Batch]:
    """As `forward_batches`, with the gradients; keys of hop t go before gradients of hop t - 1, after those of hop t - 2."""
    order = [(2 * hop.index - 2, key_batch(hop, row.rank)) for hop in row.hops]
    order += [(2 * hop.index + 1, gradient_batch(hop, row.rank)) for hop in row.hops]
    return [batch for _, batch in sorted(order, key=lambda item: item[0]) if batch]


def simulate(queues: Sequence[list[Batch]]) -> Pairs:
    """Runs every rank's batches one after the other and returns the matched (send, receive) pairs in order.

    A batch starts when the one before it is complete, and is complete when each of its messages has met its other end;
    between two ranks messages meet in the order in which they were posted, keys and gradients alike.
    Raises `PlanError` where two ends differ in size, or ranks wait for one another for ever.
    """
    waiting: dict[tuple[int, int, bool], deque[Message]] = defaultdict(deque)
    heads, left = [0] * len(queues), [0] * len(queues)
    matched: Pairs = []
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        if heads[rank] == len(queues[rank]):
            continue
        batch = queues[rank][heads[rank]]
        left[rank] = len(batch)
        for message in batch:
            others = waiting[message.peer, rank, not message.sends]
            if not others:
                waiting[rank, message.peer, message.sends].append(message)
                continue
            other = others.popleft()
            if message.end - message.start != other.end - other.start:
                raise PlanError(f"{message}, but {other}")
            matched.append((message, other) if message.sends else (other, message))
            for end in (rank, message.peer):
                left[end] -= 1
                if not left[end]:
                    heads[end] += 1
                    ready.append(end)
    for rank, queue in enumerate(queues):
        if heads[rank] < len(queue):
            stuck = next(m for key, ends in waiting.items() if key[0] == rank for m in ends)
            raise PlanError(f"deadlock: {stuck}, for ever")
    return matched


@dataclass
class _Contents:
    """Whose rows a buffer holds: sorted, disjoint pieces (start, end, owner, owner's row of the start)."""

    name: str
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, start: int, end: int, owner: int, row: int) -> None:
        insort(self.pieces, (start, end, owner, row))

    def rows(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """(owner, first row, last row) of the pieces of a range of the buffer, joined where they touch."""
        found: list[tuple[int, int, int]] = []
        place = max(bisect_right(self.pieces, start, key=lambda piece: piece[0]) - 1, 0)
        at = start
        for first, last, owner, row in self.pieces[place:]:
            if first > at or at >= end:
                break
            low, high = row + at - first, row + min(end, last) - first
            if found and found[-1][0] == owner and found[-1][2] == low:
                found[-1] = (owner, found[-1][1], high)
            elif low < high:
                found.append((owner, low, high))
            at = max(at, min(end, last))
        if at < end:
            raise PlanError(f"{self.name}: rows {start}..{end} are read, but nothing fills row {at}")
        return found

    def check_filled(self, size: int) -> None:
        """Every row of the buffer is filled exactly once."""
        at = 0
        for first, last, _, _ in self.pieces:
            if first != at:
                break
            at = last
        if at != size or at != max((piece[1] for piece in self.pieces), default=0):
            raise PlanError(f"{self.name}: {size} rows, filled by {[piece[:2] for piece in self.pieces]}")


def _check_row(row: RankPlan, num_tokens: int) -> None:
    """Hops ascend and fit their messages."""
    if row.num_tokens != num_tokens:
        raise PlanError(f"rank {row.rank} has {row.num_tokens} rows, the layout gives it {num_tokens}")
    for before, after in pairwise(row.hops):
        if before.index >= after.index:
            raise PlanError(f"rank {row.rank}: hop {after.index} comes behind hop {before.index}")
    for hop in row.hops:
        if hop.index == 0 and (hop.receive or hop.sends or hop.grad_sends):
            raise PlanError(f"rank {row.rank}, hop 0: messages at the hop of the rank's own keys")


def _rebuild(plan: PlanTables, rows: Sequence[RankPlan], hops: list[Sequence[Hop]], keys: Pairs, grads: Pairs) -> PlanTables:
    """The plan's tables, from the tiles of every rank's hops and the matched messages of their keys and of their gradients."""
    key_buffers = {(row.rank, 0): _own(row) for row in rows}
    grad_buffers = {(row.rank, 0): _own(row) for row in rows}
    transfers = _follow(keys, key_buffers, "key")
    # A gradient buffer is known by where its rows go, so the last hops come first.
    backward = sorted(((receive, send) for send, receive in grads), key=lambda pair: -pair[1].hop)
    gradients = [(hop, r, s, owner, start, end, buffer) for hop, s, r, owner, start, end, buffer in
                 _follow(backward, grad_buffers, "gradient")]  # fmt: skip
    tiles, where = [], []
    for row, its_hops in zip(rows, hops, strict=True):
        for hop in sorted(its_hops, key=lambda hop: hop.index):
            place = (row.rank, hop.index)
            held = key_buffers.get(place, _Contents(f"rank {row.rank}, hop {hop.index}: key buffer"))
            summed = grad_buffers.get(place, _Contents(f"rank {row.rank}, hop {hop.index}: gradient buffer"))
            held.check_filled(hop.num_keys)
            summed.check_filled(hop.num_grads)
            for tile, shift in zip(hop.tiles, hop.grad_shift.tolist(), strict=True):
                tiles.append(_of_owner(tile, shift, held, summed))
                where.append((row.rank, hop.index, hop.source))
    rank, index, source = np.array(where, np.int64).reshape(-1, 3).T
    return PlanTables(
        plan.mask, plan.layout, plan.route, Tiles.of(tiles), rank, index, source,
        _table(transfers).sorted_by("receiver", "hop", "start"), _table(gradients).sorted_by("sender", "hop", "start"),
    )  # fmt: skip


def _own(row: RankPlan) -> _Contents:
    return _Contents(f"rank {row.rank}: its own shard", [(0, row.num_tokens, row.rank, 0)])


def _follow(pairs: Pairs, buffers: dict[tuple[int, int], _Contents], what: str) -> list[tuple[int, int, int, int, int, int, int]]:
    """Fills the buffer at the second end of each pair with what the buffer at its first end holds.

    Returns (hop, first rank, second rank, owner, start, end, buffer of the first end) of every message.
    """
    table = []
    for known, filled in pairs:
        if known.hop != filled.hop:
            raise PlanError(f"{known}, but {filled}")
        source = buffers.get((known.rank, known.buffer), _Contents(f"rank {known.rank}, hop {known.buffer}: {what} buffer"))
        place = (filled.rank, filled.buffer)
        target = buffers.setdefault(place, _Contents(f"rank {filled.rank}, hop {filled.buffer}: {what} buffer"))
        at = filled.start
        for owner, start, end in source.rows(known.start, known.end):
            target.add(at, at + end - start, owner, start)
            table.append((filled.hop, known.rank, filled.rank, owner, start, end, known.buffer))
            at += end - start
    return table


def _of_owner(tile: Tile, shift: int, held: _Contents, summed: _Contents) -> tuple[int, ...]:
    """The tile with columns in its owner's shard; its gradients must go to the same rows."""
    read = list(held.rows(tile.k0, tile.k1))
    if len(read) != 1:
        raise PlanError(f"{held.name}: columns {tile.k0}..{tile.k1} are not one range of one owner, but {read}")
    if list(summed.rows(tile.k0 + shift, tile.k1 + shift)) != read:
        raise PlanError(f"{summed.name}: columns {tile.k0}..{tile.k1} of the keys have gradients at other rows")
    return tuple(next(iter(Tiles.of([tile]).shifted(0, read[0][1] - tile.k0))))


def _table(messages: Sequence[tuple[int, ...]]) -> Transfers:
    return Transfers(*np.array(messages, np.int64).reshape(-1, 7).T)
