"""Routes: how keys reach the ranks whose tiles read them, and how their gradients reach the owners
of the keys.

To add a route, write one function from `Need`, which says what every rank reads at every hop, and
the number of ranks to two tables of transfers, of keys and of gradients, and enter a `Route` in
`ROUTES` under the name that users give:

    def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]: ...

    ROUTES["direct"] = Route(direct)

`need.schedule` maps ring distance, (rank - owner) mod cp, to hop: a hop may have several sources.

Flags and settings take their choices from `ROUTES`, so the entry must be made before they are read.
The tables may be in any order. `cp_ring.plan.proof` states what they must hold; every plan of the
route must pass `Plan.build(mask, layout, "name").verify(rank_plans=True)`, for which
`cp_ring.testing` has masks and a ring to run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, sort_index, starts_of, union
from cp_ring.plan.records import PlanTables, Transfers
from cp_ring.plan.schedule import (
    AUTO,
    MOST_MEMBERS,
    SLOT_SHARDS,
    Schedule,
    resolve,
    ring_distance,
)
from cp_ring.plan.shard_tiles import shard_tiles
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.tiles import Tiles
from cp_ring.plan.time import Conditions, Traffic


@dataclass(frozen=True, eq=False)
class Need:
    """The keys that ranks need: `rank` reads tokens `[start, end)` of `owner`'s shard at `hop`.

    int64 arrays, sorted by rank, hop, distance from the owner, and start. `schedule` maps distance
    to hop.
    """

    rank: Ints
    hop: Ints
    owner: Ints
    start: Ints
    end: Ints
    schedule: tuple[int, ...]


def direct(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Each owner sends keys straight to the rank that reads them, at the hop that reads them;
    gradients go straight back.
    """
    own_shard = np.zeros(len(need.rank), np.int64)
    keys = Transfers(need.hop, need.owner, need.rank, need.owner, need.start, need.end, own_shard)
    return keys, keys.turned


def ring(need: Need, cp: int) -> tuple[Transfers, Transfers]:
    """Keys travel from neighbor to neighbor as far as a rank downstream needs them; gradients
    travel on in the same direction until they reach the owner.

    With one source a hop, rank r holds keys of rank r - t at hop t, and all messages go to the next
    neighbor. With several, the rank at distance d from the owner receives keys from a rank that
    held them one hop before, at distance `before[d]`. It sends its gradient buffer to a rank that
    holds the same keys one hop later, at distance `after[d]`, or to the owner after the last hop. A
    rank receives the keys that it or a rank downstream needs. The gradient buffer that it sends on
    covers the keys that it or a rank upstream needed.
    """
    before, after = _neighbors(np.array(need.schedule))
    hops = range(1, need.schedule[-1] + 1)
    keys = _passed_on(need, cp, hops[::-1], before)
    return keys.turned, _passed_on(need, cp, hops, after)


def _neighbors(schedule: Ints) -> tuple[Ints, Ints]:
    """For each ring distance, return one of the distances of the hop before and one of those of the
    hop after (0 after the last hop).

    The distances of a hop are shared out evenly among those of the neighboring hop, in order.
    """
    count = np.append(np.bincount(schedule), 1)
    first = starts_of(count)
    place = np.arange(len(schedule)) - first[schedule]
    earlier, later = np.maximum(schedule - 1, 0), schedule + 1
    before = first[earlier] + place * count[earlier] // count[schedule]
    after = first[later] + place * count[later] // count[schedule]
    return before, after % len(schedule)


def _passed_on(need: Need, cp: int, hops: range, to: Ints) -> Transfers:
    """Return the messages of ranks if every rank passes on its own needs and what it got, to
    distance `to[d]` at the next of `hops`, or after the last one to the owner.
    """
    sort = sort_index(need.hop)
    hop, start, end = need.hop[sort], need.start[sort], need.end[sort]
    group = (need.owner * cp + ring_distance(need.rank, need.owner, cp))[sort]
    none = np.zeros(0, np.int64)
    passed, parts = (none,) * 3, [(none,) * 5]
    for index in hops:
        of_hop = slice(*np.searchsorted(hop, [index, index + 1]))
        mine = group[of_hop], start[of_hop], end[of_hop]
        held, low, high = union(*(np.concatenate(both) for both in zip(mine, passed, strict=True)))
        owner, distance = np.divmod(held, cp)
        parts.append((np.full(len(held), index), owner, distance, low, high))
        passed = owner * cp + to[distance], low, high
    hop, owner, distance, start, end = map(np.concatenate, zip(*parts, strict=True))
    sender, receiver = (owner + distance) % cp, (owner + to[distance]) % cp
    onward = (hop + hops.step) % (need.schedule[-1] + 1)
    return Transfers(hop, sender, receiver, owner, start, end, onward)


@dataclass(frozen=True)
class Route:
    """A route, with all that the rest of the plan asks of it.

    transfers: a function from what every rank reads at every hop, and the number of ranks, to the
    messages of keys and of gradients.
    straight: True if keys go straight from their owner to the ranks that read them. Then a rank can
    plan its own part alone, and a hop of `auto` may have several sources, which would send keys
    past the next neighbor where ranks pass them on.
    """

    transfers: Callable[[Need, int], tuple[Transfers, Transfers]]
    straight: bool = False


DEFAULT = "direct"

ROUTES = {
    DEFAULT: Route(direct, straight=True),
    "ring": Route(ring),
}  # fmt: skip
"""Routes that flags and settings can name."""


def tables_of(
    mask: Mask,
    layout: Layout,
    route: str,
    schedule: str | Sequence[int],
    slot_shards: int | None,
    member: int | None,
    heads: int,
) -> PlanTables:
    """Return the tables of the members of the ring, from the pieces of the mask cut at the edges of
    the members' chunks. A member is `heads` ranks. With `member`, the tables hold what this
    member's part needs.

    Raises `PlanError` as `cp_ring.plan.schedule.resolve` does.
    """
    cp = layout.cp
    if schedule == AUTO and not ROUTES[route].straight:
        schedule = "ring"
    hops = resolve(schedule, cp, slot_shards)
    few = cp <= MOST_MEMBERS or len(mask.pieces) >= cp // 2  # tiles, which each rank would read
    by_time = schedule == AUTO and cp > 2 and few
    tiles, rank, far = shard_tiles(mask.pieces, layout, None if by_time else member)
    back = hops
    if by_time:
        sizes = AttentionSizes()
        if unsplit(sizes.heads, sizes.kv_heads, heads):  # about as many that can be exchanged
            kv_heads = max(heads, sizes.kv_heads // heads * heads)
            sizes = AttentionSizes(4 * kv_heads, kv_heads)
        # one table of rates, so that memory and messages are the same on every device
        given = Conditions(sizes, RATES)
        traffic = Traffic(tiles, rank, far, layout.tokens_per_rank, heads, given)
        hops, time = traffic.fastest(slot_shards or SLOT_SHARDS)
        back = traffic.backward(hops, time)
        if member is not None:
            mine = np.flatnonzero((rank == member) | ((rank - far) % cp == member))
            tiles, rank, far = tiles[mine], rank[mine], far[mine]
    source = (rank - far) % cp

    def tables(hops: Schedule, back: PlanTables | None) -> PlanTables:
        there, returned = ROUTES[route].transfers(_need(tiles, rank, far, hops), cp)
        keys = in_buffer_order(there, "receiver", cp)
        turned = returned is there.turned
        gradients = keys.turned if turned else in_buffer_order(returned, "sender", cp)
        gradients = gradients[:0] if back else gradients
        of = mask, layout, route, hops, tiles, rank, np.array(hops)[far]
        return PlanTables(*of, source, keys, gradients, member, back)

    return tables(hops, None if back == hops else tables(back, None))


def in_buffer_order(messages: Transfers, holder: str, cp: int) -> Transfers:
    """Return the messages in the order of the buffers of `holder` (`receiver` or `sender`): by
    holder, hop, distance of the holder from the owner, and start.
    """
    rank: Ints = getattr(messages, holder)
    distance = ring_distance(rank, messages.owner, cp)
    return messages[sort_index(rank, messages.hop, distance, messages.start)]


def _need(tiles: Tiles, rank: Ints, distance: Ints, hops: Schedule) -> Need:
    """Return the keys of other ranks that each rank reads at each hop."""
    cp, away = len(hops), np.flatnonzero(distance > 0)
    group, start, end = union(rank[away] * cp + distance[away], tiles.k0[away], tiles.k1[away])
    reader, far = np.divmod(group, cp)
    return Need(reader, np.array(hops)[far], (reader - far) % cp, start, end, hops)
