"""Schedules: the hop at which a rank works on the keys of each other rank.

A schedule is a tuple that maps ring distance to hop: rank r works on the keys of rank (r - d) mod
cp at hop `schedule[d]`. A rank's own keys, distance 0, are alone in hop 0. The hops do not decrease
with the distance, and none is left out.

The keys of one hop lie end to end in one receive buffer. So tiles of several sources over the same
queries become one kernel call with one merge, and the gradients of their keys are made in one call
too. The price is memory: a buffer holds as many shards as its hop has sources.

| name     | schedule at cp 6     | meaning                                                       |
|----------|----------------------|---------------------------------------------------------------|
| `ring`   | `(0, 1, 2, 3, 4, 5)` | One source a hop.                                             |
| `gather` | `(0, 1, 1, 1, 1, 1)` | All remote sources in one hop, as after an all-gather.        |
| `auto`   | `(0, 1, 1, 2, 2, 2)` | Chosen by a model of the time, the default; see `auto`.       |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, integer
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates, stage_seconds
from cp_ring.runtime import RUNTIME

Schedule = tuple[int, ...]

SLOT_SHARDS = 4
"""The most sources of a hop of `auto`, by default."""

_LAYER = AttentionSizes()
"""The layer that `auto` plans for. Tensor parallelism and the batch size change all of its times
alike.
"""

FEW_RANKS = 8
"""Ranks for which the largest hop of `auto` is chosen, where there are so many."""

MOST_SOURCES = 16
"""Sources of a hop that `auto` tries at most, whatever `slot_shards` is: more would save less than
a hundredth of the time.
"""

_NAMED: dict[str, Callable[[int], Schedule]] = {
    "ring": lambda cp: tuple(range(cp)),
    "gather": lambda cp: (0,) + (1,) * (cp - 1),
}

NAMES = ("auto", *_NAMED)
"""Schedules that flags and settings can name."""


def resolve(
    schedule: str | Sequence[int],
    cp: int,
    tokens: int,
    slot_shards: int | None = None,
    *,
    one_source: bool = False,
    node_size: int = 1,
) -> Schedule:
    """The schedule of a plan, checked.

    Args:
        schedule: a name in `NAMES`, a sequence of hops by ring distance, or such a sequence as
        text, "0,1,2,2".
        cp: the number of ranks.
        tokens: tokens of the largest shard (of one batch row, where shards hold several), which
        `auto` needs.
        slot_shards: the most sources of a hop. None is no limit, but `SLOT_SHARDS` for `auto`.
        one_source: `auto` means `ring`, for routes that pass keys from neighbor to neighbor.
        node_size: neighboring ranks on one node, whose keys `auto` expects first, over faster
        links; 1 if that is not known.

    Raises `PlanError` for an unknown name, and for a schedule that does not start with hop 0 alone,
    decreases, leaves out a hop, has another length than `cp`, or has a hop of more than
    `slot_shards` sources.
    """
    if slot_shards is not None and integer(slot_shards, "slot_shards") < 1:
        raise PlanError(f"slot_shards {slot_shards}: it must be at least 1")
    schedule = parse(schedule) if isinstance(schedule, str) else schedule
    if schedule == "auto":
        return (
            _NAMED["ring"](cp)
            if one_source
            else auto(cp, tokens, slot_shards or SLOT_SHARDS, node_size)
        )
    hops = (
        _NAMED[schedule](cp)
        if isinstance(schedule, str)
        else tuple(integer(hop, "a hop of schedule") for hop in schedule)
    )
    check(hops, cp)
    largest = max(group_sizes(hops), default=0)
    if slot_shards is not None and largest > slot_shards:
        raise PlanError(
            f"schedule {text(schedule)}: a hop has {largest} sources, but slot_shards is "
            f"{slot_shards}: raise slot_shards to {largest}, or choose another schedule"
        )
    return hops


def relay_schedule(schedule: str | Sequence[int], cp: int, node_size: int) -> Schedule:
    """The schedule of the route `relay`, whose ranks pass keys on inside a node: the keys of each
    other node take 3 hops.

    Counted by `Order`, where rank r of a node comes first to the keys of rank r of another node, at
    hop t, then to those of the others, at hop t + 1, and last to those of rank r + 1, at hop t + 2,
    which is hop t of the next node. On nodes of two ranks t + 1 is the last. The keys of the rank's
    own node come first, at hop 1: while the rank computes with them, the first ones from another
    node, of hop 2, are on the way.

    `schedule` must be `auto` or this one. Raises `PlanError` if it is not.
    """
    node, place = np.divmod(np.arange(cp), node_size)
    if node_size in (1, cp):
        return resolve(schedule, cp, 1) if schedule != "auto" else _NAMED["ring"](cp)
    hop = (
        1 + node + (place == 1)
        if node_size == 2
        else 2 * node + (place > 0) + (place == node_size - 1)
    )
    hop[:node_size] = np.arange(node_size) > 0
    hops = tuple(hop.tolist())
    requested = parse(schedule) if isinstance(schedule, str) else tuple(schedule)
    if requested not in ("auto", hops):
        raise PlanError(
            f"schedule {text(schedule)}: the route relay has a schedule of its own, leave schedule "
            "out"
        )
    return hops


def parse(words: str) -> str | Schedule:
    """A name in `NAMES`, or a tuple from text such as "0,1,2,2". Raises `PlanError` for other text,
    and as `check` does.
    """
    words = words.strip()
    if words in NAMES:
        return words
    try:
        hops = tuple(int(hop) for hop in words.split(","))
    except ValueError:
        raise PlanError(
            f"schedule {words!r}: known are {', '.join(NAMES)}, or the hop of each ring distance "
            "as in 0,1,2,2"
        ) from None
    check(hops)
    return hops


def check(hops: Schedule, cp: int | None = None) -> None:
    """Raises `PlanError` unless `hops` maps the ring distances of `cp` ranks (None: of any number)
    to hops as described above.
    """
    shown = f"schedule {text(hops)}"
    if cp is not None and len(hops) != cp:
        raise PlanError(
            f"{shown}: {len(hops)} hops for {cp} ranks; it needs the hop of each ring distance, 0 "
            f"to {cp - 1}"
        )
    if not hops or hops[0] != 0 or 0 in hops[1:]:
        raise PlanError(
            f"{shown}: hop 0 is for a rank's own keys, so ring distance 0 must be at hop 0, and no "
            "other distance"
        )
    for distance, (before, hop) in enumerate(pairwise(hops), 1):
        if hop < before:
            raise PlanError(
                f"{shown}: it decreases from hop {before} to hop {hop} at ring distance {distance}"
            )
        if hop > before + 1:
            raise PlanError(
                f"{shown}: it leaves out hop {before + 1}, before ring distance {distance}"
            )


def text(schedule: str | Sequence[int]) -> str:
    """A schedule as settings and messages show it: its name, or its hops as in 0,1,2,2."""
    return schedule if isinstance(schedule, str) else ",".join(map(str, schedule))


def group_sizes(hops: Schedule) -> list[int]:
    """The number of sources of each hop from hop 1 on."""
    return [int(size) for size in np.bincount(hops)[1:]]


@RUNTIME.cache(maxsize=1024)
def auto(
    cp: int, tokens: int, slot_shards: int = SLOT_SHARDS, node_size: int = 1, rates: Rates = RATES
) -> Schedule:
    """The schedule of least time by a model, with at most `slot_shards` sources a hop.

    The model is that of `cp_ring.plan.costs.simulate` for a rank of a causal zigzag plan, in both
    passes: each source costs as much compute as the rank's own keys, and all of its shard
    travels. Each hop costs a kernel call and a merge. The first `node_size` distances are those of
    the rank's own node, whose links are faster; with `node_size` 1 all keys come over the network,
    as where tensor parallelism fills the nodes.

    The largest hop is that of the best schedule for 8 ranks, or for twice `slot_shards` if that is
    more. With more ranks no hop is larger, and one at least is as large. So memory does not grow
    with cp.

    Masks that need less than whole shards (windows, documents) send what they need under any
    schedule, and their buffers are smaller. So the schedule depends on nothing but the arguments,
    and all ranks choose the same one without a message. Times are whole nanoseconds, so that every
    machine computes the same.
    """
    most = min(slot_shards, MOST_SOURCES)
    few = min(cp, max(2 * most, FEW_RANKS))
    sizes = _fastest(few, tokens, most, node_size, rates, forced=False)
    if cp > few:
        sizes = _fastest(cp, tokens, max(sizes), node_size, rates, forced=True)
    return (0, *(hop for hop, size in enumerate(sizes, 1) for _ in range(size)))


def _fastest(
    cp: int, tokens: int, most: int, node_size: int, rates: Rates, *, forced: bool
) -> list[int]:
    """Sources of each hop, at most `most`, such that the time is least; with `forced`, a hop has
    `most` if so many are remote.

    Found by dynamic programming: what comes after a hop depends on its own size and that of the hop
    before it.
    """
    most = max(min(most, cp - 1), 1)
    there, back = _LAYER.pair_flops
    compute, ratio = round(1e9 * tokens**2 / 2 * there / rates.flops), back / there
    inside, between = (
        round(1e9 * tokens * _LAYER.wire_key_bytes / rate)
        for rate in (rates.inside, rates.between / rates.ranks_per_card)
    )
    # the call's out is read, the float32 out read and written
    merged = tokens * _LAYER.out_width * (_LAYER.element + 8)
    call = 2 * round(1e9 * (rates.call + merged / rates.memory))
    near = max(node_size, 1)

    def wire(*hops: tuple[Ints | int, Ints | int]) -> Ints:
        """Nanoseconds to receive the shards of hops, each from a distance on, together; 0 before
        the first remote one.
        """
        fast = sum(np.clip(near, first, first + size) - first for first, size in hops)
        return np.maximum(fast * inside, (sum(size for _, size in hops) - fast) * between)

    # Axes: sources of the hop before (0: it is hop 0, or there is none), of the hop itself (0: it
    # is hop 0), of the next one.
    before, size, after = np.ix_(range(most + 1), range(most + 1), range(1, most + 1))
    forward = np.maximum(size, 1) * compute
    backward = np.where(size > 0, size * ratio * compute, ratio * compute / 2).astype(np.int64)
    never = np.iinfo(np.int64).max // 4
    # [distance, whether a hop has `most` sources, before, size]: least time from that hop on, which
    # ends before the distance.
    least = np.full((cp + 1, 2, most + 1, most + 1), never)
    chosen = np.zeros(least.shape, np.int64)
    end = np.full((2, most + 1, most + 1), never if forced else 0)
    end[1] = 0
    gradients = wire((cp - size - before, before)), wire((cp - size, size))
    last = (
        forward
        + stage_seconds(backward, gradients[0])
        + stage_seconds(np.array(round(ratio * compute / 2)), gradients[1])
    )
    least[cp] = np.minimum(end + last[..., 0], never)
    for distance in range(cp - 1, 0, -1):
        fits = slice(min(most, cp - distance))
        arriving = (
            wire((distance, after)),
            wire((distance, after), (distance - size - before, before)),
        )
        times = (call + stage_seconds(forward, arriving[0]) + stage_seconds(backward, arriving[1]))[
            ..., fits
        ]
        for full in (0, 1):
            then = np.stack(
                [
                    least[distance + b, full or int(b == most)][:, b]
                    for b in range(1, times.shape[-1] + 1)
                ],
                axis=-1,
            )  # [size, next]
            total = times + then
            chosen[distance, full] = total.argmin(-1) + 1
            least[distance, full] = np.minimum(total.min(-1), never)
    sizes: list[int] = []
    distance, full, place = 1, 0, (0, 0)
    while distance < cp:
        b = int(chosen[distance, full][place])
        sizes = [*sizes, b]
        distance = distance + b
        full = int(full or b == most)
        place = (place[1], b)
    return sizes


@dataclass(frozen=True)
class Order:
    """Distances between `cp` ranks, of which each `node_size` neighboring ones share a node.

    Each rank has one owner of keys at each distance from 0, itself, to cp - 1. With one rank a
    node, or all ranks on one, the distance of rank r from rank s is (r - s) mod cp. Else it counts
    the node first: distances below `node_size` are those of the rank's own node, the next
    `node_size` those of the node before, and so on. The first distance of a node, a multiple of
    `node_size`, is that of its rank with the same place in the node.

    The functions take numbers or int64 arrays, and return an array where one of the two is an
    array.

    At each distance every rank reads from another owner. So where a hop crosses between nodes, each
    rank sends as much as it receives, and all network cards of a node carry the same.
    """

    cp: int
    node_size: int = 1

    def distance(self, rank: Ints | int, owner: Ints | int) -> Any:
        """The distance of `rank` from `owner`."""
        size = self.node_size
        if size in (1, self.cp):
            return _wrapped(rank - owner, self.cp)
        node, place = _nodes(self.cp, size)
        return _wrapped(node[rank] - node[owner], self.cp) + _wrapped(
            place[rank] - place[owner], size
        )

    def owner(self, rank: Ints | int, distance: Ints | int) -> Any:
        """The owner from which `rank` has this distance."""
        return self._at(rank, distance, -1)

    def reader(self, owner: Ints | int, distance: Ints | int) -> Any:
        """The rank that has this distance from `owner`."""
        return self._at(owner, distance, 1)

    def _at(self, rank: Ints | int, distance: Ints | int, sign: int) -> Any:
        size = self.node_size
        if size in (1, self.cp):
            return (rank + sign * distance) % self.cp
        node = (rank // size + sign * (distance // size)) % (self.cp // size)
        return node * size + (rank + sign * distance) % size


def _wrapped(number: Any, size: int) -> Any:
    """A number in [-size, size) modulo `size`. Divisions of many numbers take much longer."""
    return number + size * (number < 0)


@RUNTIME.cache(maxsize=64)
def _nodes(cp: int, size: int) -> tuple[Ints, Ints]:
    """Of each rank: the first one of its node, and its place in the node."""
    ranks = np.arange(cp)
    return ranks - ranks % size, ranks % size
