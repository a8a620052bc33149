"""The proof that a plan is right, for all ranks, by interval arithmetic: its cost follows the tables, not the tokens.

Proven, or refused with the rank, the hop and the tokens: every allowed (query, key) pair is computed exactly once and no
other; every row that a tile reads is the rank's own or arrives at that hop; what arrives is needed; gradients come home
exactly once; no order of messages can deadlock; the receive buffers suffice. Transfers are one row for both ends, so
sends match receives in the tables by form; `verify(rank_plans=True)` proves it of the rows that the executor runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, expand, overlaps, sort_index, union
from cp_ring.plan.tables import PlanTables, Transfers
from cp_ring.plan.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Report:
    """What a proven plan does. Work is in (query, key) pairs, transfers in tokens; arrays are int64 [cp, cp], rank by hop.

    `keys_in` and `keys_out` are keys and values of the forward pass, which the backward pass fetches once more;
    `grads_in` and `grads_out` are its gradients. `slots` is the number of receive buffers in use at once.
    """

    n: int
    tokens_per_rank: Ints
    work: Ints
    keys_in: Ints
    keys_out: Ints
    grads_in: Ints
    grads_out: Ints
    slots: int

    @property
    def work_per_rank(self) -> Ints:
        return self.work.sum(1)

    @property
    def balance(self) -> float:
        """Maximum work of a rank over the mean; 1.0 is perfect."""
        total = int(self.work.sum())
        return int(self.work_per_rank.max()) * len(self.work) / total if total else 1.0

    @property
    def share_of_full_ring(self) -> float:
        """Keys moved, as a share of a ring in which every shard visits every rank."""
        everything = (len(self.work) - 1) * self.n
        return int(self.keys_in.sum()) / everything if everything else 0.0

    @property
    def moving_hops(self) -> Ints:
        """Hops at which each rank sends or receives keys, int64 [cp]."""
        return ((self.keys_in > 0) | (self.keys_out > 0)).sum(1)


def verify(plan: PlanTables, num_slots: int = 2) -> Report:
    """Proves `plan`, run with `num_slots` receive buffers.

    Raises `PlanError` that names the rank, the hop and the tokens.
    """
    check_tables(plan)
    check_sources(plan)
    check_cover(plan)
    check_keys(plan)
    check_gradients(plan)
    slots = check_slots(plan, num_slots)
    return report(plan, slots)


def report(plan: PlanTables, slots: int) -> Report:
    """Sums of the plan's tables."""
    cp, keys, grads = plan.cp, plan.transfers, plan.gradients

    def table(rank: Ints, hop: Ints, amount: Ints) -> Ints:
        return np.bincount(rank * cp + hop, amount, cp * cp).astype(np.int64).reshape(cp, cp)

    return Report(
        n=plan.n,
        tokens_per_rank=plan.layout.tokens_per_rank,
        work=table(plan.tile_rank, plan.tile_hop, plan.tiles.area()),
        keys_in=table(keys.receiver, keys.hop, keys.tokens),
        keys_out=table(keys.sender, keys.hop, keys.tokens),
        grads_in=table(grads.receiver, grads.hop, grads.tokens),
        grads_out=table(grads.sender, grads.hop, grads.tokens),
        slots=slots,
    )


def check_tables(plan: PlanTables) -> None:
    """Ranks, hops and rows exist, tables are sorted, and every row of a tile sees a key."""
    check_layout(plan.layout)
    cp, size, tiles = plan.cp, plan.layout.tokens_per_rank, plan.tiles
    for what, values in (("rank", plan.tile_rank), ("hop", plan.tile_hop), ("source", plan.tile_source)):
        _check_range(what, values, 0, cp, lambda i: f"tile {i} of rank {plan.tile_rank[i]}, hop {plan.tile_hop[i]}")
    for table in (plan.transfers, plan.gradients):
        _check_moves(table, size, cp)
    keys, grads = plan.transfers, plan.gradients
    for what, columns in (
        ("tiles are not sorted by rank and hop", (plan.tile_rank, plan.tile_hop)),
        ("transfers are not sorted by receiver, hop and row", (keys.receiver, keys.hop, keys.start)),
        ("gradients are not sorted by sender, hop and row", (grads.sender, grads.hop, grads.start)),
    ):
        if not isinstance(sort_index(*columns), slice):
            raise PlanError(what)
    inside = (tiles.q0 >= 0) & (tiles.k0 >= 0) & (tiles.q1 <= size[plan.tile_rank]) & (tiles.k1 <= size[plan.tile_source])
    rows = (tiles.q0 < tiles.q1) & (tiles.q0 >= tiles.k0 - tiles.hi) & (tiles.q1 <= tiles.k1 - tiles.lo)
    good = inside & rows & (tiles.k0 < tiles.k1) & (tiles.lo <= tiles.hi)
    _all(good, lambda i: f"{_where(plan, i)}: rows outside the shards, or rows that see no key")


def _check_range(what: str, values: Ints, first: int, end: int, where: Callable[[int], str]) -> None:
    _all((values >= first) & (values < end), lambda i: f"{where(i)}: {what} {values[i]} is not in {first}..{end}")


def _check_moves(table: Transfers, size: Ints, cp: int) -> None:
    for what in ("hop", "sender", "receiver", "owner", "buffer"):
        _check_range(what, getattr(table, what), int(what == "hop"), cp, lambda i: _moves(table, i))
    good = (table.start >= 0) & (table.start < table.end) & (table.end <= size[table.owner])
    _all(good, lambda i: f"{_moves(table, i)}, which has {size[table.owner[i]]}")


def check_layout(layout: Layout) -> None:
    """The chunks of a layout cover its tokens, and their owners exist."""
    edges, owner = layout.edges, layout.owner
    if len(edges) != len(owner) + 1 or edges[0] != 0 or edges[-1] != layout.n or (np.diff(edges) <= 0).any():
        raise PlanError(f"the layout's chunk edges do not go up from 0 to {layout.n} in {len(owner)} chunks")
    if owner.min() < 0 or owner.max() >= layout.cp:
        raise PlanError(f"the layout has a chunk of rank {owner.max()}, there are {layout.cp}")


def check_sources(plan: PlanTables) -> None:
    """The keys of one rank at one hop are of one owner, its own at hop 0."""
    keys, grads, cp = plan.transfers, plan.gradients, plan.cp
    forwarded, passed = keys[keys.buffer > 0], grads[grads.buffer > 0]
    rank = np.concatenate([plan.tile_rank, keys.receiver, forwarded.sender, grads.sender, passed.receiver])
    hop = np.concatenate([plan.tile_hop, keys.hop, forwarded.buffer, grads.hop, passed.buffer])
    owner = np.concatenate([plan.tile_source, keys.owner, forwarded.owner, grads.owner, passed.owner])
    known = np.full(cp * cp, -1)
    known[::cp] = np.arange(cp)
    known[rank[::-1] * cp + hop[::-1]] = owner[::-1]
    _all(
        (known[rank * cp + hop] == owner) & ((hop > 0) | (owner == rank)),
        lambda i: f"rank {rank[i]}, hop {hop[i]}: keys of rank {owner[i]} and of rank {known[rank[i] * cp + hop[i]]} at one hop",
    )


def check_cover(plan: PlanTables) -> None:
    """Every allowed (query, key) pair is computed exactly once, and no other.

    The query axis is cut at the edges of tiles and pieces and where their sides start or stop to slope. In such a strip
    all sides are straight, so it is enough that at its first and at its last row the tiles, from left to right, lead
    from the mask's left side to its right side with neither gap nor overlap.
    """
    tiles, parent = tiles_in_stream(plan)
    pieces = plan.mask.pieces[sort_index(plan.mask.pieces.q0)]
    if (pieces.q1[:-1] > pieces.q0[1:]).any():
        raise PlanError("the mask is no interval mask: two of its pieces share a query")
    marks = np.zeros(plan.n + 1, bool)
    for part in (tiles, pieces):
        for row in (part.q0, part.q1, np.clip(part.k0 - part.lo, part.q0, part.q1), np.clip(part.k1 - part.hi, part.q0, part.q1)):
            marks[row] = True
    cuts = np.flatnonzero(marks)
    which, strip = _strips_of(tiles, cuts)
    left, right = _sides(tiles, which, cuts[strip]), _sides(tiles, which, cuts[strip + 1] - 1)
    sort = sort_index(strip, left[0])
    which, strip, sides = which[sort], strip[sort], np.concatenate([left, right])[:, sort]

    piece, allowed_strip = _strips_of(pieces, cuts)
    allowed = np.full((4, len(cuts)), -1)
    allowed[:, allowed_strip] = np.concatenate(
        [_sides(pieces, piece, cuts[allowed_strip]), _sides(pieces, piece, cuts[allowed_strip + 1] - 1)]
    )
    computed = np.zeros(len(cuts), bool)
    computed[strip] = True
    _all(computed | (allowed[0] < 0), lambda i: _uncovered(plan.layout, cuts[i], cuts[i + 1], allowed[0, i], allowed[1, i]))
    # Each tile must begin where the one before it, or else the mask, has its left side.
    fresh = np.diff(strip, prepend=-1) != 0
    due = np.where(fresh, allowed[0::2, strip], np.roll(sides[1::2], 1, axis=1))
    good = (sides[0::2] == due).all(0)
    last = np.append(fresh[1:], True)[: len(strip)]
    good &= ~last | (sides[1::2] == allowed[1::2, strip]).all(0)
    _all(
        good,
        lambda i: (
            f"{_where(plan, parent[which[i]])}: query {cuts[strip[i]]} of queries {cuts[strip[i]]}..{cuts[strip[i] + 1]} "
            f"sees keys {sides[0, i]}..{sides[1, i]}, but mask and neighbors leave it {due[0, i]}..{allowed[1, strip[i]]}"
        ),
    )


def _strips_of(tiles: Tiles, cuts: Ints) -> tuple[Ints, Ints]:
    """All pairs (tile, strip of rows between two cuts)."""
    first = np.searchsorted(cuts, tiles.q0)
    return expand(first, np.searchsorted(cuts, tiles.q1) - first)


def _sides(tiles: Tiles, which: Ints, row: Ints) -> Ints:
    """First key, and the one behind the last key, that tiles allow in a row: int64 [2, pairs]."""
    k0, k1, lo, hi = tiles.data[2:, which]
    return np.stack([np.maximum(k0, row + lo), np.minimum(k1, row + hi + 1)])


def tiles_in_stream(plan: PlanTables) -> tuple[Tiles, Ints]:
    """The plan's tiles in token positions, split where chunks of a shard meet, and the index of the tile of each."""
    layout = plan.layout
    chunk = np.argsort(layout.owner, kind="stable")
    size = np.diff(layout.edges)[chunk]
    end = np.cumsum(size)
    start, slide = end - size, layout.edges[chunk] - (end - size)
    shard = np.cumsum(layout.tokens_per_rank) - layout.tokens_per_rank
    # One axis for all shards, laid end to end, makes one search of all ranks' rows.
    tiles = plan.tiles.shifted(shard[plan.tile_rank], shard[plan.tile_source])
    parent, cell = overlaps(tiles.q0, tiles.q1, start, end)
    part, column = overlaps(tiles.k0[parent], tiles.k1[parent], start, end)
    parent, cell = parent[part], cell[part]
    split = tiles[parent].within(start[cell], end[cell], start[column], end[column]).shifted(slide[cell], slide[column])
    live = split.live()
    return split[live], parent[live]


def check_keys(plan: PlanTables) -> None:
    """What arrives at a hop is what its tiles read and later sends forward, no less and no more; it arrives in time."""
    keys, cp = plan.transfers, plan.cp
    own = keys.buffer == 0
    # The executor holds a buffer until the hop after its own has been sent, no longer.
    held = np.where(own, keys.sender == keys.owner, keys.buffer == keys.hop - 1)
    _all(held, lambda i: f"{_moves(keys, i)}, which it does not have")
    _one_peer(keys.receiver * cp + keys.hop, keys.sender, cp)
    away, forwarded = np.flatnonzero(plan.tile_hop > 0), keys[~own]
    needed = union(
        np.concatenate([plan.tile_rank[away] * cp + plan.tile_hop[away], forwarded.sender * cp + forwarded.buffer]),
        np.concatenate([plan.tiles.k0[away], forwarded.start]),
        np.concatenate([plan.tiles.k1[away], forwarded.end]),
    )
    _same(needed, _disjoint(keys, keys.receiver * cp + keys.hop, "arrive"), cp, "needs", "receives")


def check_gradients(plan: PlanTables) -> None:
    """What a hop's tiles and arrivals add to its gradient buffer leaves it once, to its owner or to a later buffer."""
    grads, cp = plan.gradients, plan.cp
    home = grads.buffer == 0
    _all(
        np.where(home, grads.receiver == grads.owner, grads.buffer == grads.hop + 1),
        lambda i: f"{_moves(grads, i)}, where its gradients have no place",
    )
    away, passed = np.flatnonzero(plan.tile_hop > 0), grads[~home]
    made = union(
        np.concatenate([plan.tile_rank[away] * cp + plan.tile_hop[away], passed.receiver * cp + passed.buffer]),
        np.concatenate([plan.tiles.k0[away], passed.start]),
        np.concatenate([plan.tiles.k1[away], passed.end]),
    )
    _same(made, _disjoint(grads, grads.sender * cp + grads.hop, "leave"), cp, "makes gradients of", "sends gradients of")


def check_slots(plan: PlanTables, num_slots: int) -> int:
    """Key buffers in use at once, at most `num_slots`, when each live hop's batch is posted before the hop before it.

    Nothing can deadlock: on every rank batches go in one order (keys of hop t before gradients of hop t - 1, these before
    keys of hop t + 1), both ends of a transfer name the same hop, and a buffer is sent from after the hop that filled it.
    So the earliest batch that is not complete can always proceed.
    """
    keys, grads, cp = plan.transfers, plan.gradients, plan.cp
    live = np.zeros(cp * cp, bool)
    live[::cp] = True
    for rank, hop in ((plan.tile_rank, plan.tile_hop), (keys.receiver, keys.hop), (keys.sender, keys.hop),
                      (grads.sender, grads.hop), (grads.receiver, grads.hop)):  # fmt: skip
        live[rank * cp + hop] = True
    step = np.cumsum(live)
    filled, release = np.zeros(cp * cp, bool), step.copy()
    filled[keys.receiver * cp + keys.hop] = True
    forwarded = keys[keys.buffer > 0]
    np.maximum.at(release, forwarded.sender * cp + forwarded.buffer, step[forwarded.sender * cp + forwarded.hop] - 1)
    filled_at = np.flatnonzero(filled)
    in_use = np.zeros(int(step[-1]) + 2, np.int64)
    np.add.at(in_use, step[filled_at] - 1, 1)
    np.add.at(in_use, release[filled_at] + 1, -1)
    in_use = np.cumsum(in_use)
    slots = int(in_use.max(initial=0))
    if slots > num_slots:
        group = int(np.searchsorted(step, np.flatnonzero(in_use > num_slots)[0]))
        raise PlanError(f"rank {group // cp}, hop {group % cp}: {slots} receive buffers in use, num_slots is {num_slots}")
    return slots


def _disjoint(table: Transfers, group: Ints, verb: str) -> tuple[Ints, Ints, Ints]:
    """The ranges of each group, joined where they touch; none may overlap. The table is sorted by group and start."""
    twice = (group[1:] == group[:-1]) & (table.start[1:] < table.end[:-1])
    _all(~twice, lambda i: f"{_moves(table, i + 1)}: rows that {verb} twice")
    return union(group, table.start, table.end)


def _one_peer(group: Ints, peer: Ints, cp: int) -> None:
    two = (group[1:] == group[:-1]) & (peer[1:] != peer[:-1])
    _all(~two, lambda i: f"rank {group[i] // cp}, hop {group[i] % cp}: keys from rank {peer[i]} and from rank {peer[i + 1]}")


def _same(wanted: tuple[Ints, Ints, Ints], found: tuple[Ints, Ints, Ints], cp: int, wants: str, finds: str) -> None:
    """Two lists of disjoint sorted ranges are equal."""
    if all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True)):
        return
    count = min(len(wanted[0]), len(found[0]))
    differs = np.any([a[:count] != b[:count] for a, b in zip(wanted, found, strict=True)], axis=0)
    place = int(np.flatnonzero(np.append(differs, True))[0])
    group = min(int(ranges[0][place]) for ranges in (wanted, found) if place < len(ranges[0]))

    def rows(ranges: tuple[Ints, Ints, Ints]) -> str:
        mine = ranges[0] == group
        return ", ".join(f"{start}..{end}" for start, end in zip(ranges[1][mine], ranges[2][mine], strict=True)) or "nothing"

    raise PlanError(f"rank {group // cp}, hop {group % cp} {wants} rows {rows(wanted)} and {finds} rows {rows(found)}")


def _where(plan: PlanTables, tile: int) -> str:
    q0, q1, k0, k1 = plan.tiles.data[:4, tile]
    return (
        f"rank {plan.tile_rank[tile]}, hop {plan.tile_hop[tile]}: tile of rows {q0}..{q1}, keys {k0}..{k1} "
        f"of rank {plan.tile_source[tile]}"
    )


def _moves(table: Transfers, i: int) -> str:
    return (
        f"rank {table.sender[i]}, hop {table.hop[i]}: sends rows {table.start[i]}..{table.end[i]} of rank {table.owner[i]} "
        f"to rank {table.receiver[i]}"
    )


def _uncovered(layout: Layout, q0: int, q1: int, k0: int, k1: int) -> str:
    rank, source = layout.owner[np.searchsorted(layout.edges, [q0, k0], "right") - 1]
    return f"rank {rank}: queries {q0}..{q1} see keys {k0}..{k1}, the first of them of rank {source}, but no hop computes them"


def _all(good: NDArray[np.bool_], message: Callable[[int], str]) -> None:
    """Raises `PlanError` with the message of the first index that is not good."""
    if not good.all():
        raise PlanError(message(int(np.flatnonzero(~good)[0])))
