"""The proof that the rank plans of all ranks, as the executor runs them, together compute the mask.

It uses nothing of the plan's tables but the mask, the layout and the schedule, so it also finds
errors in the step from tables to rank plans. The argument, by function:

1. `key_messages`, `gradient_messages`, `forward_order`, `backward_order` list the messages that
   each rank posts, in the order in which the executor posts them.
2. `simulate` runs these queues as a transport does: between two ranks, the first send meets the
   first receive. It proves that every message meets one of its size and that no rank waits for
   ever, and returns the pairs that met.
3. `_follow` tracks the data through these pairs: hop 0 holds the rank's own tokens, and a received
   range holds what its sender's buffer held. So every place of every buffer is known by owner and
   token, and must be filled exactly once.
4. `_rebuild` uses this to rename the keys of all tiles to tokens of their owners, and checks that
   each tile's gradients go to the same tokens. A tile over the keys of several owners becomes one
   tile for each. The result is a `PlanTables` again, once in forward and once in backward order.
5. `cp_ring.plan.proof.verify` proves these tables.

Cost: proportional to the messages and tiles of all ranks, one Python object each, so much slower
than the proof of the tables, which works on arrays: 0.1 s for a causal mask on 16 ranks, 3 s on
128. It is meant for tests and for one plan of each kind of mask, not for every plan.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.proof import verify
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tables import Hop, PlanTables, RankPlan, Transfer, Transfers
from cp_ring.plan.tiles import Tile, Tiles

MOST_RANKS = 128
"""Up to so many ranks the certificate of a job proves its rank plans."""

FEW_RANKS = 16
"""Up to so many ranks a job proves them again while it trains."""


class Message(NamedTuple):
    """One end of a message: tokens `[start, end)` of buffer `buffer` (a hop) of `rank`, sent to or
    received from `peer`.
    """

    rank: int
    hop: int
    peer: int
    sends: bool
    buffer: int
    start: int
    end: int

    def __str__(self) -> str:
        verb = "sends to" if self.sends else "receives from"
        tokens = f"tokens {self.start}..{self.end} of buffer {self.buffer}"
        return f"rank {self.rank}, hop {self.hop}: {verb} rank {self.peer} {tokens}"


Posted = list[Message]  # messages of one rank that are posted together
Pairs = list[tuple[Message, Message]]  # the send and the receive of a message


def verify_rank_plans(plan: PlanTables, rank_plans: Sequence[RankPlan], num_slots: int = 2) -> None:
    """Proves that `rank_plans`, those of all ranks in order, compute `plan.mask` with `num_slots`
    receive buffers.

    Raises `PlanError` that names the rank, the hop and the tokens.
    """
    for part in rank_plans:
        _check_rank_plan(part, plan)
    keys = simulate([forward_order(part) for part in rank_plans])
    simulate([backward_order(part) for part in rank_plans])
    grads = simulate(
        [
            [posted for hop in part.hops if (posted := gradient_messages(hop, part.member))]
            for part in rank_plans
        ]
    )
    for hops in ([part.hops for part in rank_plans], [part.backward for part in rank_plans]):
        verify.verify(_rebuild(plan, rank_plans, hops, keys, grads), num_slots)


def key_messages(hop: Hop, rank: int) -> Posted:
    """The messages of a hop's keys and values, posted before the previous hop is computed."""
    sends = _posted(hop, rank, hop.sends, sends=True, of_hop=False)
    return sends + _posted(hop, rank, hop.receives, sends=False, of_hop=True)


def gradient_messages(hop: Hop, rank: int) -> Posted:
    """The messages of a hop's gradients, posted together after the hop is computed."""
    sends = _posted(hop, rank, hop.grad_sends, sends=True, of_hop=True)
    return sends + _posted(hop, rank, hop.grad_receives, sends=False, of_hop=False)


def _posted(
    hop: Hop, rank: int, transfers: Iterable[Transfer], *, sends: bool, of_hop: bool
) -> Posted:
    """Messages of transfers. of_hop: whether they fill or leave the buffer of the hop itself."""
    return [
        Message(rank, hop.index, t.peer, sends, hop.index if of_hop else t.buffer, *span)
        for t in transfers
        for span in t.ranges
    ]


def forward_order(part: RankPlan) -> list[Posted]:
    """A rank's messages in the order in which the forward pass posts them."""
    return [posted for hop in part.hops if (posted := key_messages(hop, part.member))]


def backward_order(part: RankPlan) -> list[Posted]:
    """A rank's messages in the order of the backward pass: keys of hop t between gradients of hops
    t - 2 and t - 1.
    """
    timed = [(2 * hop.index - 2, key_messages(hop, part.member)) for hop in part.hops]
    timed += [(2 * hop.index + 1, gradient_messages(hop, part.member)) for hop in part.hops]
    return [posted for _, posted in sorted(timed, key=lambda item: item[0]) if posted]


def simulate(queues: Sequence[list[Posted]]) -> Pairs:
    """Runs every rank's queue and returns the (send, receive) pairs that met, in the order in which
    they met.

    A rank posts its next messages when all those that it posted before are complete. A message is
    complete when it has met its other end; between two ranks messages meet in the order in which
    they were posted, keys and gradients alike. No executor waits more than this, so messages that
    complete here complete there.

    Raises `PlanError` if two ends differ in size, or if ranks wait for each other for ever. Cost:
    linear in the messages.
    """
    waiting: dict[tuple[int, int, bool], deque[Message]] = defaultdict(deque)
    heads, left = [0] * len(queues), [0] * len(queues)
    matched: Pairs = []
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        if heads[rank] == len(queues[rank]):
            continue
        posted = queues[rank][heads[rank]]
        left[rank] = len(posted)
        for message in posted:
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
    """What a buffer holds: sorted, disjoint pieces (start, end, owner, token of the owner at
    `start`).
    """

    name: str
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, start: int, end: int, owner: int, token: int) -> None:
        insort(self.pieces, (start, end, owner, token))

    def tokens(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """(owner, start, end) of the owners' tokens in a range of the buffer, joined where they
        touch.
        """
        held: list[tuple[int, int, int]] = []
        place = max(bisect_right(self.pieces, start, key=lambda piece: piece[0]) - 1, 0)
        at = start
        for first, last, owner, token in self.pieces[place:]:
            if first > at or at >= end:
                break
            low, high = token + at - first, token + min(end, last) - first
            if held and held[-1][0] == owner and held[-1][2] == low:
                held[-1] = (owner, held[-1][1], high)
            elif low < high:
                held.append((owner, low, high))
            at = max(at, min(end, last))
        if at < end:
            raise PlanError(
                f"{self.name}: tokens {start}..{end} are read, but nothing fills token {at}"
            )
        return held

    def check_filled(self, size: int) -> None:
        """Raises `PlanError` unless every token of the buffer is filled exactly once."""
        at = 0
        for first, last, _, _ in self.pieces:
            if first != at:
                break
            at = last
        if at != size or at != max((piece[1] for piece in self.pieces), default=0):
            raise PlanError(
                f"{self.name}: {size} tokens, filled by {[piece[:2] for piece in self.pieces]}"
            )


def _check_rank_plan(part: RankPlan, plan: PlanTables) -> None:
    """The sizes of the shards are right, hops ascend, and hop 0 moves nothing."""
    wanted = int(plan.layout.tokens_per_rank[part.member])
    if part.num_tokens != wanted:
        raise PlanError(
            f"rank {part.member} has {part.num_tokens} tokens, but the layout gives it {wanted}"
        )
    for before, after in pairwise(part.hops):
        if before.index >= after.index:
            raise PlanError(f"rank {part.member}: hop {after.index} follows hop {before.index}")
    for hop in part.hops:
        if hop.index == 0 and (hop.receives or hop.sends or hop.grad_sends):
            raise PlanError(
                f"rank {part.member}, hop 0: messages at the hop of the rank's own keys"
            )


def _rebuild(
    plan: PlanTables,
    rank_plans: Sequence[RankPlan],
    hops: list[Sequence[Hop]],
    keys: Pairs,
    grads: Pairs,
) -> PlanTables:
    """The plan's tables again, from the tiles of the hops of every rank and the matched messages of
    keys and of gradients.
    """
    key_buffers = {(part.member, 0): _own_shard(part) for part in rank_plans}
    grad_buffers = {(part.member, 0): _own_shard(part) for part in rank_plans}
    transfers = _follow(keys, key_buffers, "key")
    # What a gradient buffer holds is known from where its ranges go, so the last hops come first.
    backward = sorted(((receive, send) for send, receive in grads), key=lambda pair: -pair[1].hop)
    gradients = [(hop, r, s, owner, start, end, buffer) for hop, s, r, owner, start, end, buffer in
                 _follow(backward, grad_buffers, "gradient")]  # fmt: skip
    tiles, where = [], []
    for part, own_hops in zip(rank_plans, hops, strict=True):
        for hop in sorted(own_hops, key=lambda hop: hop.index):
            held = _buffer(key_buffers, part.member, hop.index, "key")
            summed = _buffer(grad_buffers, part.member, hop.index, "gradient")
            held.check_filled(hop.num_keys)
            summed.check_filled(hop.num_grads)
            _check_sources(part, hop, held, summed, plan.cp)
            for tile, shift in zip(hop.tiles, hop.grad_shift.tolist(), strict=True):
                for owner, own_tile in _of_owners(tile, shift, held, summed):
                    tiles.append(own_tile)
                    where.append((part.member, hop.index, owner))
    rank, index, source = np.array(where, np.int64).reshape(-1, 3).T
    return replace(
        plan,
        tiles=Tiles.of(tiles),
        tile_rank=rank,
        tile_hop=index,
        tile_source=source,
        transfers=_table(transfers).in_buffer_order("receiver", plan.cp),
        gradients=_table(gradients).in_buffer_order("sender", plan.cp),
    )


def _own_shard(part: RankPlan) -> _Contents:
    return _Contents(f"rank {part.member}: its own shard", [(0, part.num_tokens, part.member, 0)])


def _buffer(buffers: dict[tuple[int, int], _Contents], rank: int, hop: int, what: str) -> _Contents:
    return buffers.setdefault((rank, hop), _Contents(f"rank {rank}, hop {hop}: {what} buffer"))


def _follow(
    pairs: Pairs, buffers: dict[tuple[int, int], _Contents], what: str
) -> list[tuple[int, int, int, int, int, int, int]]:
    """Fills the buffer at the second end of each pair with what the buffer at its first end holds.

    Returns (hop, first rank, second rank, owner, start, end, buffer of the first end) for every
    owner's range that a message carries. Raises `PlanError` if the ends name different hops, or the
    first end's buffer is not filled.
    """
    table = []
    for known, filled in pairs:
        if known.hop != filled.hop:
            raise PlanError(f"{known}, but {filled}")
        source = _buffer(buffers, known.rank, known.buffer, what)
        target = _buffer(buffers, filled.rank, filled.buffer, what)
        at = filled.start
        for owner, start, end in source.tokens(known.start, known.end):
            target.add(at, at + end - start, owner, start)
            table.append((filled.hop, known.rank, filled.rank, owner, start, end, known.buffer))
            at += end - start
    return table


def _check_sources(part: RankPlan, hop: Hop, held: _Contents, summed: _Contents, cp: int) -> None:
    """Raises `PlanError` unless `hop.sources` are the owners of what the hop's buffers hold, by
    distance.
    """
    owners = {piece[2] for contents in (held, summed) for piece in contents.pieces}
    sources = tuple(sorted(owners, key=lambda owner: ring_distance(part.member, owner, cp)))
    if sources != hop.sources:
        raise PlanError(
            f"rank {part.member}, hop {hop.index}: its buffers hold tokens of ranks {sources}, not "
            f"{hop.sources}"
        )


def _of_owners(
    tile: Tile, shift: int, held: _Contents, summed: _Contents
) -> Iterable[tuple[int, Tile]]:
    """The tile cut where the owner of its keys changes: (owner, tile with keys counted in the
    owner's shard).

    Raises `PlanError` unless the gradients of its keys go to the same tokens of the same owners.
    """
    read = list(held.tokens(tile.k0, tile.k1))
    if list(summed.tokens(tile.k0 + shift, tile.k1 + shift)) != read:
        raise PlanError(
            f"{summed.name}: the gradients of keys {tile.k0}..{tile.k1} are at other tokens"
        )
    at = tile.k0
    for owner, start, end in read:
        part = Tiles.of([tile]).within(k0=at, k1=at + end - start)
        yield from ((owner, own_tile) for own_tile in part.shifted(0, start - at))
        at += end - start


def _table(messages: Sequence[tuple[int, ...]]) -> Transfers:
    return Transfers(*np.array(messages, np.int64).reshape(-1, 7).T)
