"""The proof that rank plans, as the executor runs them, follow the tables of a plan.

Together with the proof of the tables (`cp_ring.plan.proof.verify`) it shows that they compute the
mask. It may be about one rank: if each rank proves its own plan, all of them are proven.

1. `_filled` fills the buffers of a rank: hop 0 holds its own tokens, a later hop those of its rows
   of the table, one after the other. So the owner and the token of every place of every buffer are
   known.
2. `_check_messages` compares the messages of the rank, in order, with its rows of the tables. A row
   is one message at both of its ends, so each message meets one of its size; the proof of the
   tables shows that no order of them can deadlock.
3. `_own_tiles` renames the keys of the tiles to tokens of their owners, and checks that each tile's
   gradients go to the same tokens. A tile over the keys of several owners becomes one for each.
   These tiles, with the tables' tiles of other ranks, are proven as the tables are, once in forward
   and once in backward order.

Cost: proportional to the messages and tiles of these ranks, one Python object each, and two proofs
of the tables; 0.2 s for one rank of 128 under a causal mask.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.proof import verify
from cp_ring.plan.ranges import sort_index
from cp_ring.plan.schedule import ring_distance
from cp_ring.plan.tables import Hop, PlanTables, RankPlan, Transfers
from cp_ring.plan.tiles import Tile, Tiles


def verify_rank_plans(plan: PlanTables, parts: Sequence[RankPlan], num_slots: int = 2) -> None:
    """Prove that `parts`, the plans of some ranks or of all, follow the tables, run with
    `num_slots` receive buffers.

    Raises `PlanError` that names the rank, the hop and the tokens.
    """
    buffers = []
    for part in parts:
        _check_rank_plan(part, plan)
        buffers.append(_check_messages(part, plan))
    others = ~np.isin(plan.tile_rank, [part.member for part in parts])
    old = np.stack([plan.tile_rank, plan.tile_hop, plan.tile_source])[:, others]
    for orders in ([part.hops for part in parts], [part.backward for part in parts]):
        own = [
            tile
            for part, hops, filled in zip(parts, orders, buffers, strict=True)
            for tile in _own_tiles(part, hops, filled, plan.cp)
        ]
        places = np.array([place for place, _ in own], np.int64).reshape(-1, 3).T
        ranks, hops, sources = np.concatenate([old, places], axis=1)
        tiles = Tiles.concatenate(plan.tiles[others], Tiles.of([tile for _, tile in own]))
        sort = sort_index(ranks, hops)
        tables = replace(plan, tiles=tiles[sort], tile_rank=ranks[sort], tile_hop=hops[sort],
                         tile_source=sources[sort])  # fmt: skip
        verify.verify(tables, num_slots)


@dataclass
class _Contents:
    """The contents of a buffer: sorted, disjoint pieces (start, end, owner, token of the owner at
    `start`).
    """

    name: str
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, start: int, end: int, owner: int, token: int) -> None:
        insort(self.pieces, (start, end, owner, token))

    def tokens(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """Return the owners' tokens in a range of the buffer as (owner, start, end), joined where
        they touch.
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
        """Raise `PlanError` unless every token of the buffer is filled exactly once."""
        at = 0
        for first, last, _, _ in self.pieces:
            if first != at:
                break
            at = last
        if at != size or at != max((piece[1] for piece in self.pieces), default=0):
            raise PlanError(
                f"{self.name} has {size} tokens, each to be filled once, but messages fill "
                f"{[piece[:2] for piece in self.pieces]}"
            )


def _check_rank_plan(part: RankPlan, plan: PlanTables) -> None:
    """Raise `PlanError` unless the sizes of the shards are right, hops ascend, and hop 0 moves
    nothing.
    """
    wanted = int(plan.layout.tokens_per_rank[part.member])
    if part.num_tokens != wanted:
        raise PlanError(
            f"rank {part.member} has {part.num_tokens} tokens, but the layout gives it {wanted}"
        )
    for before, after in pairwise(part.hops):
        if before.index >= after.index:
            raise PlanError(
                f"rank {part.member}: hops must ascend, but hop {after.index} follows hop "
                f"{before.index}"
            )
    for hop in part.hops:
        if hop.index == 0 and (hop.receives or hop.sends or hop.grad_sends):
            raise PlanError(
                f"rank {part.member}, hop 0: it works on the rank's own keys, but it has messages"
            )


class _Buffers(NamedTuple):
    """The contents of a rank's buffers by hop."""

    keys: dict[int, _Contents]
    grads: dict[int, _Contents]


def _check_messages(part: RankPlan, plan: PlanTables) -> _Buffers:
    """Return the contents of the buffers of a rank. Raises `PlanError` unless its messages agree
    with its rows of the tables.
    """
    rank = part.member
    arriving, leaving = plan.transfers.where("receiver", rank), plan.gradients.where("sender", rank)
    keys, grads = _filled(part, arriving, "key"), _filled(part, leaving, "gradient")
    sent = plan.transfers_by_sender.where("sender", rank)
    returned = plan.gradients_by_receiver.where("receiver", rank)
    for name, buffers, rows, peer, of_hop in (
        ("receives", keys, arriving, "sender", True),
        ("sends", keys, sent, "receiver", False),
        ("grad_sends", grads, leaving, "receiver", True),
        ("grad_receives", grads, returned, "sender", False),
    ):
        wanted: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        found: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        columns = (rows.hop, getattr(rows, peer), rows.owner, rows.start, rows.end)
        for index, other, *tokens in np.stack(columns, 1).tolist():
            wanted[index, other].append(tuple(tokens))
        for hop in part.hops:
            for transfer in getattr(hop, name):
                contents = _buffer(buffers, rank, hop.index if of_hop else transfer.buffer)
                for span in transfer.ranges:
                    found[hop.index, transfer.peer] += contents.tokens(*span)
        for index, other in sorted({*wanted, *found}):
            if wanted[index, other] != found[index, other]:
                raise PlanError(
                    f"rank {rank}, hop {index}: its part of the plan has {name} with rank {other} "
                    f"of tokens (owner, start, end) {found[index, other]}, the whole plan has "
                    f"{wanted[index, other]}"
                )
    return _Buffers(keys, grads)


def _filled(part: RankPlan, rows: Transfers, what: str) -> dict[int, _Contents]:
    """Return the contents of a rank's buffers by hop: the tokens of `rows`, one after the other."""
    own = _Contents(f"rank {part.member}: its own shard", [(0, part.num_tokens, part.member, 0)])
    buffers = {0: own}
    columns = (rows.hop, rows.owner, rows.start, rows.end)
    for hop, owner, start, end in np.stack(columns, 1).tolist():
        contents = _buffer(buffers, part.member, hop, what)
        at = contents.pieces[-1][1] if contents.pieces else 0
        contents.add(at, at + end - start, owner, start)
    return buffers


def _buffer(buffers: dict[int, _Contents], rank: int, hop: int, what: str = "no") -> _Contents:
    return buffers.setdefault(hop, _Contents(f"rank {rank}, hop {hop}: {what} buffer"))


def _own_tiles(
    part: RankPlan, hops: Sequence[Hop], buffers: _Buffers, cp: int
) -> Iterator[tuple[tuple[int, int, int], Tile]]:
    """Yield a rank's tiles as ((rank, hop, owner of the keys), tile with keys counted in the
    owner's shard).
    """
    for hop in sorted(hops, key=lambda hop: hop.index):
        held = _buffer(buffers.keys, part.member, hop.index)
        summed = _buffer(buffers.grads, part.member, hop.index)
        held.check_filled(hop.num_keys)
        summed.check_filled(hop.num_grads)
        _check_sources(part, hop, held, summed, cp)
        for tile, shift in zip(hop.tiles, hop.grad_shift.tolist(), strict=True):
            for owner, own_tile in _of_owners(tile, shift, held, summed):
                yield (part.member, hop.index, owner), own_tile


def _check_sources(part: RankPlan, hop: Hop, held: _Contents, summed: _Contents, cp: int) -> None:
    """Raise `PlanError` unless `hop.sources` are the owners of the tokens in the hop's buffers, the
    nearest in the ring first.
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
    """Cut the tile where the owner of its keys changes: (owner, tile with keys counted in the
    owner's shard).

    Raises `PlanError` unless the gradients of its keys go to the same tokens of the same owners.
    """
    read = list(held.tokens(tile.k0, tile.k1))
    if list(summed.tokens(tile.k0 + shift, tile.k1 + shift)) != read:
        raise PlanError(
            f"{summed.name}: the gradients of keys {tile.k0}..{tile.k1} go to other tokens"
        )
    at = tile.k0
    for owner, start, end in read:
        part = Tiles.of([tile]).within(k0=at, k1=at + end - start)
        yield from ((owner, own_tile) for own_tile in part.shifted(0, start - at))
        at += end - start
