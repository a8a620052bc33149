"""Ways to spoil a plan, each of which its proof must notice.

A mutation takes a plan (or the rank plans of all its ranks) and a random generator. It returns a
spoiled copy, or None if the plan has nothing of the kind.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import numpy as np

from cp_ring.plan import OPEN, RankPlan, Tiles, Transfer
from cp_ring.plan.ranges import sort_index
from cp_ring.plan.routes import in_buffer_order
from cp_ring.plan.schedule import ring_distance

Rng = np.random.Generator


def _with_tiles(plan, index=slice(None), **columns):
    """The tiles at `index`, with other values in some columns, sorted as the proof wants them."""
    names = ("tile_rank", "tile_hop", "tile_source")
    kept = {name: columns.get(name, getattr(plan, name))[index] for name in names}
    sort = sort_index(kept["tile_rank"], kept["tile_hop"])
    kept["tiles"] = plan.tiles[index]
    return replace(plan, **{name: values[sort] for name, values in kept.items()})


def tile_dropped(plan, rng):
    every = np.arange(len(plan.tiles))
    return _with_tiles(plan, np.delete(every, rng.integers(len(every))))


def tile_doubled(plan, rng):
    every = np.arange(len(plan.tiles))
    return _with_tiles(plan, np.append(every, rng.integers(len(every))))


def _edit_tile(change):
    """Changes the columns of one tile: q0, q1, k0, k1, lo and hi."""

    def mutate(plan, rng):
        data = plan.tiles.data.copy()
        change(data[:, rng.integers(len(plan.tiles))])
        return replace(plan, tiles=Tiles(data))

    return mutate


def _add(*amounts):
    def change(tile):
        tile += np.array(amounts) * (abs(tile) < 1 << 59)

    return change


def _one_key_more(tile):
    tile[3] += 1
    tile[5] = max(tile[5], tile[3] - tile[0]) if tile[5] > 1 << 59 else tile[5] + 1


def _no_corner(tile):
    tile[5] = min(tile[5], tile[3] - 1 - tile[0]) - 1


def _move_tile(column):
    """Puts one tile on the next rank, hop or source."""

    def mutate(plan, rng):
        values = getattr(plan, column).copy()
        values[rng.integers(len(values))] += 1
        return _with_tiles(plan, **{column: values % plan.cp}) if plan.cp > 1 else None

    return mutate


def _table_mutation(table, column, change):
    """Changes one entry of one column of the transfers or the gradients."""

    def mutate(plan, rng):
        messages = getattr(plan, table)
        if not len(messages):
            return None
        values = getattr(messages, column).copy()
        i = rng.integers(len(messages))
        values[i] = change(int(values[i]), plan.cp)
        if (table, column) in (("transfers", "sender"), ("gradients", "receiver")):
            # Another rank of the same hop may have the owner's tokens too, and would be right.
            while (
                plan.schedule[ring_distance(values[i], messages.owner[i], plan.cp)]
                == messages.buffer[i]
            ):
                values[i] = change(int(values[i]), plan.cp)
        return replace(
            plan, **{table: _sorted(table, replace(messages, **{column: values}), plan.cp)}
        )

    return mutate


def _pick_mutation(table, doubled):
    """Doubles or drops one entry of the transfers or the gradients."""

    def mutate(plan, rng):
        messages = getattr(plan, table)
        if not len(messages):
            return None
        i, every = rng.integers(len(messages)), np.arange(len(messages))
        picked = messages[np.sort(np.append(every, i)) if doubled else np.delete(every, i)]
        return replace(plan, **{table: picked})

    return mutate


def keys_two_hops_old(plan, rng):
    """A route that forwards keys from the buffer of two hops before, which the executor has reused
    by then.
    """
    keys = plan.transfers
    late = keys.hop >= 3
    if not late.any():
        return None
    sender = np.where(
        late, (keys.owner + _first_distance(plan, keys.hop - 2)) % plan.cp, keys.sender
    )
    buffer = np.where(late, keys.hop - 2, keys.buffer)
    return replace(
        plan,
        transfers=_sorted("transfers", replace(keys, sender=sender, buffer=buffer), plan.cp),
    )


def gradients_two_hops_on(plan, rng):
    """A route that sends gradients to the buffer of two hops later, which does not exist yet."""
    grads = plan.gradients
    early = grads.hop + 2 <= plan.schedule[-1]
    if not early.any():
        return None
    receiver = np.where(
        early, (grads.owner + _first_distance(plan, grads.hop + 2)) % plan.cp, grads.receiver
    )
    buffer = np.where(early, grads.hop + 2, grads.buffer)
    late = _sorted("gradients", replace(grads, receiver=receiver, buffer=buffer), plan.cp)
    return replace(plan, gradients=late)


def _other_source(plan, rank, owner):
    """Another owner whose keys `rank` uses at the hop at which it uses those of `owner`."""
    hops = np.array(plan.schedule)
    others = np.flatnonzero(hops == hops[ring_distance(rank, owner, plan.cp)])
    others = (rank - others[others != ring_distance(rank, owner, plan.cp)]) % plan.cp
    return int(others[0]) if len(others) else None


def tile_on_another_source_of_its_hop(plan, rng):
    for i in rng.permutation(np.flatnonzero(plan.tile_hop)).tolist():
        other = _other_source(plan, int(plan.tile_rank[i]), int(plan.tile_source[i]))
        if other is not None:
            source = plan.tile_source.copy()
            source[i] = other
            return _with_tiles(plan, tile_source=source)
    return None


def source_missing_from_a_slot(plan, rng):
    """All keys of one of the hop's owners stay away."""
    keys = plan.transfers
    for i in rng.permutation(len(keys)).tolist():
        if _other_source(plan, int(keys.receiver[i]), int(keys.owner[i])) is not None:
            keep = (keys.receiver != keys.receiver[i]) | (keys.owner != keys.owner[i])
            return replace(plan, transfers=keys[keep])
    return None


def gradients_to_another_owner_of_the_hop(plan, rng):
    """Of gradients that should be home after this hop."""
    grads = plan.gradients
    for i in rng.permutation(np.flatnonzero(grads.buffer == 0)).tolist():
        other = _other_source(plan, int(grads.sender[i]), int(grads.owner[i]))
        if other is not None:
            receiver = grads.receiver.copy()
            receiver[i] = other if receiver[i] == grads.owner[i] else (receiver[i] + 1) % plan.cp
            return replace(plan, gradients=replace(grads, receiver=receiver))
    return None


def another_schedule(plan, rng):
    """A right schedule, but not the one of the tables: an owner whose keys are used is at another
    hop.
    """
    used = sorted({*ring_distance(plan.tile_rank, plan.tile_source, plan.cp).tolist()} - {0})
    for distance in used:
        hops = np.array(plan.schedule)
        hops[distance:] += 1 if hops[distance] == hops[distance - 1] else -1
        if hops[distance]:
            return replace(plan, schedule=tuple(hops.tolist()))
    return None


def _to_itself(table):
    """A message more, from a rank's buffer of a hop to the same buffer."""

    def mutate(plan, rng):
        messages = getattr(plan, table)
        if not len(messages):
            return None
        holder = "receiver" if table == "transfers" else "sender"
        more = messages[np.append(np.arange(len(messages)), rng.integers(len(messages)))]
        sender, receiver, buffer = more.sender.copy(), more.receiver.copy(), more.buffer.copy()
        sender[-1] = receiver[-1] = getattr(more, holder)[-1]
        buffer[-1] = more.hop[-1]
        spoiled = replace(more, sender=sender, receiver=receiver, buffer=buffer)
        return replace(plan, **{table: _sorted(table, spoiled, plan.cp)})

    return mutate


def _first_distance(plan, hop):
    """The first ring distance of each hop."""
    return np.searchsorted(plan.schedule, hop)


def _sorted(table, messages, cp):
    return in_buffer_order(messages, "receiver" if table == "transfers" else "sender", cp)


def _next(value, cp):
    return (value + 1) % cp


_TABLE_MUTATIONS = {
    f.__name__: f
    for f in (
        tile_dropped, tile_doubled, keys_two_hops_old, gradients_two_hops_on, tile_on_another_source_of_its_hop,
        source_missing_from_a_slot, gradients_to_another_owner_of_the_hop, another_schedule,
    )
}  # fmt: skip
_TABLE_MUTATIONS |= {
    "tile_shifted_in_keys": _edit_tile(_add(0, 0, 1, 1, 1, 1)),
    "tile_shifted_in_queries": _edit_tile(_add(-1, -1, 0, 0, 1, 1)),
    "tile_with_fewer_queries": _edit_tile(_add(0, -1, 0, 0, 0, 0)),
    "tile_with_more_keys": _edit_tile(_one_key_more),
    "tile_without_its_corner": _edit_tile(_no_corner),
    "tile_on_the_wrong_rank": _move_tile("tile_rank"),
    "tile_at_the_wrong_hop": _move_tile("tile_hop"),
    "tile_on_the_wrong_keys": _move_tile("tile_source"),
}
for _table in ("transfers", "gradients"):
    _TABLE_MUTATIONS |= {
        f"{_table}: dropped": _pick_mutation(_table, doubled=False),
        f"{_table}: doubled": _pick_mutation(_table, doubled=True),
        f"{_table}: range shortened": _table_mutation(_table, "end", lambda value, cp: value - 1),
        f"{_table}: range lengthened": _table_mutation(_table, "end", lambda value, cp: value + 1),
        f"{_table}: wrong sender": _table_mutation(_table, "sender", _next),
        f"{_table}: wrong receiver": _table_mutation(_table, "receiver", _next),
        f"{_table}: wrong owner": _table_mutation(_table, "owner", _next),
        f"{_table}: wrong hop": _table_mutation(_table, "hop", _next),
        f"{_table}: to itself": _to_itself(_table),
        f"{_table}: wrong buffer": _table_mutation(_table, "buffer", _next),
    }


def _of_plan(
    mutate,
):
    def spoil(plan, rng):
        tables = mutate(plan.ring, rng)
        return tables and replace(plan, ring=tables, _rank_plans={})

    return spoil


PLAN_MUTATIONS = {name: _of_plan(mutate) for name, mutate in _TABLE_MUTATIONS.items()}

RankPlans = list[RankPlan]


def _edit_hop(parts, rng, fits, change):
    """Changes one hop among those that fit."""
    places = [(part.rank, i) for part in parts for i, hop in enumerate(part.hops) if fits(hop)]
    if not places:
        return None
    rank, i = places[rng.integers(len(places))]
    hops = list(parts[rank].hops)
    hops[i] = change(hops[i])
    return [replace(part, hops=tuple(hops)) if part.rank == rank else part for part in parts]


def _shifted(transfer):
    return replace(transfer, ranges=tuple((start + 1, end + 1) for start, end in transfer.ranges))


def _shortened(transfer):
    (start, end), *others = transfer.ranges
    return replace(transfer, ranges=((start, end - 1), *others))


def _to_next(transfer):
    return replace(transfer, peer=transfer.peer + 1)


def _to_second_next_buffer(transfer):
    return replace(transfer, buffer=transfer.buffer + 2)


def _pick(hop, index):
    return replace(hop, tiles=hop.tiles[index], grad_shift=hop.grad_shift[index])


def _swap_hops(parts, rng):
    """Two hops of one rank change places."""
    ranks = [part.rank for part in parts if sum(bool(len(hop.tiles)) for hop in part.hops) > 1]
    if not ranks:
        return None
    rank = ranks[rng.integers(len(ranks))]
    hops = list(parts[rank].hops)
    a, b = (i for i, hop in enumerate(hops) if len(hop.tiles)) if len(hops) == 2 else _two(hops)
    hops[a], hops[b] = replace(hops[b], index=hops[a].index), replace(hops[a], index=hops[b].index)
    return [replace(part, hops=tuple(hops)) if part.rank == rank else part for part in parts]


def _two(hops):
    return [i for i, hop in enumerate(hops) if len(hop.tiles)][-2:]


def _swap_ranks(parts, rng):
    busy = [part.rank for part in parts if part.hops]
    if not busy or parts[busy[0]].member == parts[busy[-1]].member:
        return None
    a, b = busy[0], busy[-1]
    return [
        replace(parts[{a: b, b: a}.get(part.rank, part.rank)], rank=part.rank) for part in parts
    ]


def _peers_swapped(hop, name):
    """The first two transfers keep their tokens and change their peers."""
    first, second, *others = getattr(hop, name)
    return replace(
        hop, **{name: (replace(first, peer=second.peer), replace(second, peer=first.peer), *others)}
    )


def _source_missing(parts, rng):
    """A rank does not receive one of a hop's sources, and the other rank does not send it."""
    places = [
        (part.rank, i) for part in parts for i, hop in enumerate(part.hops) if len(hop.receives) > 1
    ]
    if not places:
        return None
    rank, i = places[rng.integers(len(places))]
    hop = parts[rank].hops[i]
    *others, missing = hop.receives
    sent = next(sent for sent in parts[missing.peer].hops if sent.index == hop.index)
    without = replace(sent, sends=tuple(t for t in sent.sends if t.peer != rank))
    for at, new in ((rank, replace(hop, receives=tuple(others))), (missing.peer, without)):
        hops = tuple(new if old.index == new.index else old for old in parts[at].hops)
        parts = [replace(part, hops=hops) if part.rank == at else part for part in parts]
    return parts


def _messages_swapped(hop):
    """The first two messages of one peer arrive at each other's place."""
    place = next(i for i, t in enumerate(hop.receives) if len(t.ranges) > 1)
    first, second, *others = hop.receives[place].ranges
    swapped = replace(hop.receives[place], ranges=(second, first, *others))
    return replace(hop, receives=(*hop.receives[:place], swapped, *hop.receives[place + 1 :]))


def _sent_to_itself(part, hop):
    """Besides, the rank sends the first token of its shard to itself, into a place of its own in
    the hop's buffer.
    """
    place = hop.num_keys
    return replace(
        hop, num_keys=place + 1, sends=(*hop.sends, Transfer(part.rank, ((0, 1),))),
        receives=(*hop.receives, Transfer(part.rank, ((place, place + 1),))),
    )  # fmt: skip


def _messages_to_itself(parts, rng):
    fits = [part for part in parts if part.num_tokens and any(map(_away, part.hops))]
    if not fits:
        return None
    part = fits[rng.integers(len(fits))]
    place = next(i for i, hop in enumerate(part.hops) if _away(hop))
    hops = (*part.hops[:place], _sent_to_itself(part, part.hops[place]), *part.hops[place + 1 :])
    return [replace(one, hops=hops) if one.rank == part.rank else one for one in parts]


def _full_tile(hop, inside):
    """A tile without a band, of a hop with several sources; with `inside`, one after which there
    are more keys.
    """
    tiles = hop.tiles
    found = (
        (tiles.lo == -OPEN)
        & (tiles.hi == OPEN)
        & ((tiles.k1 < hop.num_keys) if inside else (tiles.k1 - tiles.k0 > 1))
    )
    return int(np.flatnonzero(found)[0]) if len(hop.receives) > 1 and found.any() else None


def _with_keys(hop, tile, more):
    data = hop.tiles.data.copy()
    data[3, tile] += more
    return replace(hop, tiles=Tiles(data))


def _hop_mutation(fits, change):
    return lambda parts, rng: _edit_hop(parts, rng, fits, change)


def _of_first(name, change):
    """Changes the first transfer of a hop's messages of this name."""

    def changed(hop):
        first, *others = getattr(hop, name)
        return replace(hop, **{name: (change(first), *others)})

    return _hop_mutation(attrgetter(name), changed)


def _busy(hop):
    return len(hop.tiles) > 0


def _away(hop):
    return bool(hop.index and len(hop.tiles))


_sends, _receives, _grad_sends, _grad_receives = map(
    attrgetter, ("sends", "receives", "grad_sends", "grad_receives")
)

RANK_PLAN_MUTATIONS = {
    "tile dropped": _hop_mutation(_busy, lambda hop: _pick(hop, np.arange(1, len(hop.tiles)))),
    "tile doubled": _hop_mutation(
        _busy, lambda hop: _pick(hop, np.append(np.arange(len(hop.tiles)), 0))
    ),
    "tile shifted": _hop_mutation(_busy, lambda hop: replace(hop, tiles=hop.tiles.shifted(0, 1))),
    "hop emptied": _hop_mutation(_away, lambda hop: _pick(hop, np.arange(0))),
    "send without receive": _hop_mutation(
        _receives, lambda hop: replace(hop, receives=hop.receives[1:])
    ),
    "receive without send": _hop_mutation(_sends, lambda hop: replace(hop, sends=hop.sends[1:])),
    "send range shortened": _of_first("sends", _shortened),
    "send range shifted": _of_first("sends", _shifted),
    "send to the wrong rank": _of_first("sends", _to_next),
    "receive from the wrong rank": _of_first("receives", _to_next),
    "key buffer of another size": _hop_mutation(
        _away, lambda hop: replace(hop, num_keys=hop.num_keys + 1)
    ),
    "gradient tokens shifted": _hop_mutation(
        _away, lambda hop: replace(hop, grad_shift=hop.grad_shift + 1)
    ),
    "gradients not sent": _hop_mutation(_grad_sends, lambda hop: replace(hop, grad_sends=())),
    "gradients not received": _hop_mutation(
        _grad_receives, lambda hop: replace(hop, grad_receives=())
    ),
    "gradients added at other tokens": _of_first("grad_receives", _shifted),
    "gradients added to another buffer": _of_first("grad_receives", _to_second_next_buffer),
    "gradient buffer of another size": _hop_mutation(
        _away, lambda hop: replace(hop, num_grads=hop.num_grads + 1)
    ),
    "two sources swapped in a slot": _hop_mutation(
        lambda hop: len(hop.receives) > 1, lambda hop: _peers_swapped(hop, "receives")
    ),
    "source at another offset of the slot": _hop_mutation(
        lambda hop: len(hop.receives) > 1,
        lambda hop: replace(hop, receives=(*hop.receives[:-1], _shifted(hop.receives[-1]))),
    ),
    "source missing from a slot": _source_missing,
    "a rank sends to itself": _messages_to_itself,
    "tile reaches one token into the next source": _hop_mutation(
        lambda hop: _full_tile(hop, True) is not None,
        lambda hop: _with_keys(hop, _full_tile(hop, True), 1),
    ),
    "tile of several sources one token short": _hop_mutation(
        lambda hop: _full_tile(hop, False) is not None,
        lambda hop: _with_keys(hop, _full_tile(hop, False), -1),
    ),
    "gradients to the wrong one of two owners": _hop_mutation(
        lambda hop: len(hop.grad_sends) > 1, lambda hop: _peers_swapped(hop, "grad_sends")
    ),
    "two messages between the same ranks swapped": _hop_mutation(
        lambda hop: any(len(t.ranges) > 1 for t in hop.receives), _messages_swapped
    ),
    "hops swapped": _swap_hops,
    "ranks swapped": _swap_ranks,
}
