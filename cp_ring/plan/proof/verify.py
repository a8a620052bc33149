"""The proof that the tables of a plan are right, for all ranks at once.

What is proven, in this order. Each check relies on those before it.

| function          | statement                                                                   |
|-------------------|-----------------------------------------------------------------------------|
| `check_layout`    | The chunks cover every token exactly once, and their owners exist.          |
| `check_tables`    | Ranks, hops and tokens exist; the tables are sorted; every query of a tile  |
|                   | sees a key.                                                                 |
| `check_sources`   | A rank uses the keys of an owner at one hop, that of the schedule, and at   |
|                   | hop 0 its own alone; no message goes from a rank to itself.                 |
| `check_cover`     | Every allowed (query, key) pair is computed exactly once, and no other is.  |
| `check_keys`      | Every key that a tile reads is the rank's own or arrives at that hop;       |
|                   | nothing else arrives; a sender holds what it sends.                         |
| `check_gradients` | The gradient of every key that a hop reads leaves that hop once and reaches |
|                   | the key's owner.                                                            |
| `check_slots`     | The receive buffers suffice; no order of messages can deadlock.             |

A violation raises `PlanError` with the rank, the hop and the tokens.

The arguments are stated at the functions, that of `check_cover` in `cp_ring.plan.proof.cover`. All
are interval arithmetic on the tables: sorting, searching and running sums over T tiles, M messages,
P pieces of the mask and C chunks. Time and memory are O((T + M + P + C) log) plus one entry for
each (rank, hop), and, in `check_cover`, one byte for each token and one entry for each pair of a
tile and a strip that it crosses and for each owner in each strip of a piece; nothing is ever
expanded to (query, key) pairs or to pairs of chunks. A plan of 1M
tokens, 4,096 documents and 64 ranks has 4,348 tiles and 126 messages.

A message has one entry in the tables for both of its ends, so sends match receives by construction.
That the executor's rank plans agree with the tables is proven by
`cp_ring.plan.proof.verify_ranks`. That kernels and transports do what a rank plan says is not
proven here; the certificate tests it on the running job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.proof.cover import check_cover, place_of
from cp_ring.plan.ranges import Ints, check_all, integer, sort_index, union
from cp_ring.plan.schedule import check, ring_distance
from cp_ring.plan.tables import PlanTables, Transfers


@dataclass(frozen=True, eq=False)
class Report:
    """The work and the traffic of a proven plan. Arrays are int64 [cp, cp], rank by hop.

    work: (query, key) pairs computed.
    keys_in, keys_out: tokens whose keys and values a rank receives and sends in the forward pass,
    and again in backward.
    grads_in, grads_out: tokens whose gradients of keys and values a rank receives and sends in the
    backward pass.
    slots: the number of receive buffers in use at once.
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
        """The largest work of a rank over the mean; 1.0 is perfect."""
        total = int(self.work.sum())
        return int(self.work_per_rank.max()) * len(self.work) / total if total else 1.0

    @property
    def share_of_full_ring(self) -> float:
        """The keys that move, as a share of a ring in which every shard visits every rank."""
        everything = (len(self.work) - 1) * self.n
        return int(self.keys_in.sum()) / everything if everything else 0.0

    @property
    def moving_hops(self) -> Ints:
        """The number of hops at which each rank sends or receives keys, int64 [cp]."""
        return ((self.keys_in > 0) | (self.keys_out > 0)).sum(1)


def verify(plan: PlanTables, num_slots: int = 2) -> Report:
    """Prove `plan`, run with `num_slots` receive buffers, by all checks of this module.

    Raises `PlanError` that names the rank, the hop and the tokens.
    """
    integer(num_slots, "num_slots")
    check_tables(plan)
    check_sources(plan)
    check_cover(plan)
    check_keys(plan)
    check_gradients(plan)
    slots = check_slots(plan, num_slots)
    return report(plan, slots)


def report(plan: PlanTables, slots: int) -> Report:
    """Sum up the plan's tables by rank and hop; this proves nothing."""
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
    """Prove that ranks, hops and tokens exist, that tables are sorted as `PlanTables` says, and
    that every query of a tile sees a key.
    """
    check_layout(plan.layout)
    check(plan.schedule, plan.cp)
    cp, tiles = plan.cp, plan.tiles
    size = plan.layout.tokens_per_rank
    columns = {"rank": plan.tile_rank, "hop": plan.tile_hop, "source": plan.tile_source}
    for what, values in columns.items():
        _check_range(
            what,
            values,
            range(cp),
            lambda i: f"tile {i} of rank {plan.tile_rank[i]}, hop {plan.tile_hop[i]}",
        )
    for table in (plan.transfers, plan.gradients):
        _check_moves(table, size, cp)
    keys, grads = plan.transfers, plan.gradients
    for what, order in {
        "tiles are not sorted by rank and hop": (plan.tile_rank, plan.tile_hop),
        "transfers are not sorted by receiver, hop, distance and start": _order(
            keys, keys.receiver, plan
        ),
        "gradients are not sorted by sender, hop, distance and start": _order(
            grads, grads.sender, plan
        ),
    }.items():
        if not isinstance(sort_index(*order), slice):
            raise PlanError(what)
    q0, q1, k0, k1, lo, hi = tiles.data
    inside = (q0 >= 0) & (k0 >= 0)
    inside &= (q1 <= size[plan.tile_rank]) & (k1 <= size[plan.tile_source])
    good = inside & (q0 < q1) & (q0 >= k0 - hi) & (q1 <= k1 - lo) & (k0 < k1) & (lo <= hi)
    check_all(
        good,
        lambda i: f"{place_of(plan, i)}: tokens outside the shards, or queries that see no key",
    )


def _order(table: Transfers, holder: Ints, plan: PlanTables) -> tuple[Ints, ...]:
    return holder, table.hop, ring_distance(holder, table.owner, plan.cp), table.start


def _check_range(what: str, values: Ints, allowed: range, where: Callable[[int], str]) -> None:
    first, end = allowed.start, allowed.stop
    check_all(
        (values >= first) & (values < end),
        lambda i: f"{where(i)}: {what} {values[i]} is not in {first}..{end}",
    )


def _check_moves(table: Transfers, size: Ints, cp: int) -> None:
    for what in ("hop", "sender", "receiver", "owner", "buffer"):
        allowed = range(int(what == "hop"), cp)
        _check_range(what, getattr(table, what), allowed, lambda i: _moves(table, i))
    good = (table.start >= 0) & (table.start < table.end) & (table.end <= size[table.owner])
    check_all(good, lambda i: f"{_moves(table, i)}, which has {size[table.owner[i]]}")


def check_layout(layout: Layout) -> None:
    """Prove that the chunks of a layout cover its tokens exactly once, and that their owners
    exist.
    """
    edges, owner = layout.edges, layout.owner
    if (
        len(edges) != len(owner) + 1
        or edges[0] != 0
        or edges[-1] != layout.n
        or (np.diff(edges) <= 0).any()
    ):
        raise PlanError(
            f"the edges of the layout's {len(owner)} chunks do not go up from 0 to {layout.n}"
        )
    if owner.min() < 0 or owner.max() >= layout.cp:
        bad = owner.min() if owner.min() < 0 else owner.max()
        raise PlanError(f"the layout has a chunk of rank {bad}, but ranks are 0 to {layout.cp - 1}")


def check_sources(plan: PlanTables) -> None:
    """Prove that a rank uses the keys of an owner at one hop, the hop of the schedule, and only its
    own keys at hop 0.

    Every use of a (rank, hop) buffer names an owner: tiles, arriving and forwarded keys, leaving
    and passed-on gradients. The distance of the rank from the owner must be one of that hop. So
    (rank, distance) tells apart the tokens of several owners that share a buffer, and the checks
    below treat each such pair as a buffer of its own. No message goes from a rank to itself. Cost:
    linear in the tables.
    """
    keys, grads = plan.transfers, plan.gradients
    _check_peers(keys)
    _check_peers(grads)
    forwarded, passed = keys[keys.buffer > 0], grads[grads.buffer > 0]
    rank = np.concatenate(
        [plan.tile_rank, keys.receiver, forwarded.sender, grads.sender, passed.receiver]
    )
    hop = np.concatenate([plan.tile_hop, keys.hop, forwarded.buffer, grads.hop, passed.buffer])
    owner = np.concatenate(
        [plan.tile_source, keys.owner, forwarded.owner, grads.owner, passed.owner]
    )
    due = np.array(plan.schedule)[ring_distance(rank, owner, plan.cp)]
    check_all(
        due == hop,
        lambda i: (
            f"rank {rank[i]}, hop {hop[i]}: keys of rank {owner[i]}, which belong to hop {due[i]}"
        ),
    )


def _check_peers(table: Transfers) -> None:
    check_all(
        table.sender != table.receiver,
        lambda i: f"{_moves(table, i)}: a rank has no messages to itself",
    )


def check_keys(plan: PlanTables) -> None:
    """Prove that a hop receives the keys that its tiles read and that are forwarded from it, no
    less and no more, and in time.

    A sender holds what it sends: its own shard, or the buffer of the hop before, which the executor
    keeps until then. The union of the ranges of an owner that a rank reads or forwards must equal
    the union of those that it receives, without overlap. By induction over hops, every forwarded
    key was sent by its owner before.

    Cost: sorting of tiles and messages.
    """
    keys = plan.transfers
    own = keys.buffer == 0
    held = np.where(own, keys.sender == keys.owner, keys.buffer == keys.hop - 1)
    check_all(held, lambda i: f"{_moves(keys, i)}, which it does not have")
    forwarded = keys[~own]
    needed = _with_tiles(plan, forwarded, forwarded.sender)
    arrived = _disjoint(keys, _buffer(keys.receiver, keys.owner, plan), "arrive")
    _same(needed, arrived, plan, "needs", "receives")


def check_gradients(plan: PlanTables) -> None:
    """Prove that the gradient of every key that a hop reads leaves that hop exactly once and
    reaches the key's owner.

    A hop's gradient buffer holds the gradients that its tiles make and those that arrive. For each
    owner, the union of these must equal the union of the ranges that leave it, without overlap, to
    the owner or to the buffer of the next hop. By induction from the last hop back to the first, no
    gradient is lost or added twice.

    Cost: sorting of tiles and messages.
    """
    grads = plan.gradients
    home = grads.buffer == 0
    check_all(
        np.where(home, grads.receiver == grads.owner, grads.buffer == grads.hop + 1),
        lambda i: f"{_moves(grads, i)}, where its gradients have no place",
    )
    passed = grads[~home]
    summed = _with_tiles(plan, passed, passed.receiver)
    leaves = _disjoint(grads, _buffer(grads.sender, grads.owner, plan), "leave")
    _same(summed, leaves, plan, "makes gradients of", "sends gradients of")


def _with_tiles(plan: PlanTables, passed: Transfers, rank: Ints) -> tuple[Ints, Ints, Ints]:
    """Return which key ranges each receive buffer must hold, as sorted and disjoint (buffer, start,
    end): the keys that tiles read after hop 0, and those that messages carry on. `rank` [messages]
    is the rank through whose buffer message i of `passed` goes; a buffer is numbered by rank and
    owner of the keys.
    """
    away, tiles = np.flatnonzero(plan.tile_hop > 0), plan.tiles
    reads = _buffer(plan.tile_rank[away], plan.tile_source[away], plan)
    return union(
        np.concatenate([reads, _buffer(rank, passed.owner, plan)]),
        np.concatenate([tiles.k0[away], passed.start]),
        np.concatenate([tiles.k1[away], passed.end]),
    )


def check_slots(plan: PlanTables, num_slots: int) -> int:
    """Prove that at most `num_slots` key buffers are in use at once, and that no order of messages
    can deadlock. Returns how many buffers are in use.

    A rank posts the keys of a hop before it computes the previous hop of its plan. A buffer is in
    use from then until its hop is computed, or until it has been forwarded, whichever is later.
    Running sums over all (rank, hop) count buffers.

    Deadlock: every rank posts its messages in one order: keys of hop t, gradients of hop t - 1,
    keys of hop t + 1, and so on. Both ends of a message name the same hop, and a buffer is sent
    after the hop that filled it. So among all messages that are not complete, the earliest in this
    order has both ends posted, and completes.
    """
    keys, grads, cp = plan.transfers, plan.gradients, plan.cp
    live = np.zeros(cp * cp, bool)
    live[::cp] = True
    live[plan.tile_rank * cp + plan.tile_hop] = True
    for table in (keys, grads):
        for rank in (table.sender, table.receiver):
            live[rank * cp + table.hop] = True
    time = np.cumsum(live)  # counts the hops of all ranks, one rank after the other
    filled, release = np.zeros(cp * cp, bool), time.copy()
    filled[keys.receiver * cp + keys.hop] = True
    forwarded = keys[keys.buffer > 0]
    np.maximum.at(
        release,
        forwarded.sender * cp + forwarded.buffer,
        time[forwarded.sender * cp + forwarded.hop] - 1,
    )
    filled_at = np.flatnonzero(filled)
    in_use = np.zeros(int(time[-1]) + 2, np.int64)
    np.add.at(in_use, time[filled_at] - 1, 1)
    np.add.at(in_use, release[filled_at] + 1, -1)
    in_use = np.cumsum(in_use)
    slots = int(in_use.max(initial=0))
    if slots > num_slots:
        group = int(np.searchsorted(time, np.flatnonzero(in_use > num_slots)[0]))
        raise PlanError(
            f"rank {group // cp}, hop {group % cp}: {slots} receive buffers in use, num_slots is "
            f"{num_slots}"
        )
    return slots


def _buffer(rank: Ints, owner: Ints, plan: PlanTables) -> Ints:
    """Return a number for each pair (rank, owner), in the order of the tables: the part of the
    rank's buffers that holds the owner's tokens.
    """
    return rank * plan.cp + ring_distance(rank, owner, plan.cp)


def _disjoint(table: Transfers, group: Ints, verb: str) -> tuple[Ints, Ints, Ints]:
    """Return the ranges of each group, joined where they touch. Raises `PlanError` if two overlap.
    The table must be sorted by group and start.
    """
    twice = (group[1:] == group[:-1]) & (table.start[1:] < table.end[:-1])
    check_all(~twice, lambda i: f"{_moves(table, i + 1)}: these tokens {verb} twice")
    return union(group, table.start, table.end)


def _same(
    wanted: tuple[Ints, Ints, Ints],
    moved: tuple[Ints, Ints, Ints],
    plan: PlanTables,
    wants: str,
    moves: str,
) -> None:
    """Raise `PlanError` if two lists of sorted disjoint ranges (buffer as in `_buffer`, start, end)
    differ.
    """
    if all(np.array_equal(a, b) for a, b in zip(wanted, moved, strict=True)):
        return
    count = min(len(wanted[0]), len(moved[0]))
    differs = np.any([a[:count] != b[:count] for a, b in zip(wanted, moved, strict=True)], axis=0)
    place = int(np.append(differs, True).argmax())
    group = min(int(ranges[0][place]) for ranges in (wanted, moved) if place < len(ranges[0]))

    def tokens(ranges: tuple[Ints, Ints, Ints]) -> str:
        of_group = np.stack(ranges[1:])[:, ranges[0] == group].T
        return ", ".join(f"{start}..{end}" for start, end in of_group) or "nothing"

    rank, distance = divmod(group, plan.cp)
    owner = f" of rank {(rank - distance) % plan.cp}"
    raise PlanError(
        f"rank {rank}, hop {plan.schedule[distance]} {wants} tokens {tokens(wanted)}{owner}, but "
        f"{moves} tokens {tokens(moved)}"
    )


def _moves(table: Transfers, i: int) -> str:
    return (
        f"rank {table.sender[i]}, hop {table.hop[i]}: sends tokens "
        f"{table.start[i]}..{table.end[i]} of rank {table.owner[i]} to rank {table.receiver[i]}"
    )
