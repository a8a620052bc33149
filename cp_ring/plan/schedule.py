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
| `auto`   | `(0, 1, 1, 2, 2, 2)` | The default: 2 sources, then 4, 4, ...; see `auto`.           |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, integer
from cp_ring.runtime import RUNTIME

Schedule = tuple[int, ...]

SLOT_SHARDS = 4
"""The most sources of a hop of `auto`, by default, but where few keys are remote."""

_NAMED: dict[str, Callable[[int], Schedule]] = {
    "ring": lambda cp: tuple(range(cp)),
    "gather": lambda cp: (0,) + (1,) * (cp - 1),
}

NAMES = ("auto", *_NAMED)
"""Schedules that flags and settings can name."""


def resolve(
    schedule: str | Sequence[int],
    cp: int,
    slot_shards: int | None = None,
    *,
    one_source: bool = False,
    few_keys: bool = False,
) -> Schedule:
    """The schedule of a plan, checked.

    Args:
        schedule: a name in `NAMES`, a sequence of hops by ring distance, or such a sequence as
        text, "0,1,2,2".
        cp: the number of ranks.
        slot_shards: the most sources of a hop. None is no limit, but `SLOT_SHARDS` for `auto`.
        one_source: `auto` means `ring`, for routes that pass keys from neighbor to neighbor.
        few_keys: ranks read so few keys of others that one hop of `auto` brings them all.

    Raises `PlanError` for an unknown name, and for a schedule that does not start with hop 0 alone,
    decreases, leaves out a hop, has another length than `cp`, or has a hop of more than
    `slot_shards` sources.
    """
    if slot_shards is not None and integer(slot_shards, "slot_shards") < 1:
        raise PlanError(f"slot_shards {slot_shards}: it must be at least 1")
    schedule = parse(schedule) if isinstance(schedule, str) else schedule
    if schedule == "auto":
        if one_source:
            return _NAMED["ring"](cp)
        return _NAMED["gather"](cp) if few_keys else auto(cp, slot_shards or SLOT_SHARDS)
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
        return resolve(schedule, cp) if schedule != "auto" else _NAMED["ring"](cp)
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


def auto(cp: int, slot_shards: int = SLOT_SHARDS) -> Schedule:
    """The schedule of masks whose ranks read most keys of most others: 2 sources in the first
    remote hop, whose transfer must hide behind the rank's own keys, then `slot_shards` in each.

    So no hop is larger with more ranks, and memory does not grow with cp. Of all schedules with so
    many sources a hop the fastest is about a hundredth faster, for causal and full masks.
    """
    first = min(2, slot_shards, cp - 1)
    later = (2 + place // slot_shards for place in range(cp - 1 - first))
    return (0, *[1] * first, *later)


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
