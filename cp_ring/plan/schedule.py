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
| `auto`   | `(0, 1, 1, 2, 2, 2)` | The default: by bytes and work; see `cp_ring.plan.time`.      |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, integer

Schedule = tuple[int, ...]

SLOT_SHARDS = 4
"""The default for the most shards that a hop of `auto` brings."""

LONG = 8_192
"""Tokens whose keys are never too many for a hop of backward, nor for one of its kernel calls."""

MOST_MEMBERS = 128
"""The longest ring whose `auto` follows from the bytes and the work of each hop. A longer one takes
the rule, or hops that bring as many keys as a slot holds, if that is faster.
"""

_NAMED: dict[str, Callable[[int], Schedule]] = {
    "ring": lambda cp: tuple(range(cp)),
    "gather": lambda cp: (0,) + (1,) * (cp - 1),
}

AUTO = "auto"
"""The setting that lets the mask decide the schedule, or that asks for the fastest Ulysses
degree.
"""

NAMES = (AUTO, *_NAMED)
"""Schedules that flags and settings can name."""


def resolve(
    schedule: str | Sequence[int],
    cp: int,
    slot_shards: int | None = None,
) -> Schedule:
    """Return the checked schedule of a plan.

    Args:
        schedule: a name in `NAMES`, a sequence of hops by ring distance, or such a sequence as
            text, "0,1,2,2".
        cp: the number of ranks.
        slot_shards: the most sources of a hop. None is `SLOT_SHARDS` for `auto`, and no limit for
            other schedules.

    Raises `PlanError` for an unknown name, and for a schedule that does not start with hop 0 alone,
    decreases, leaves out a hop, has another length than `cp`, or has a hop of more than
    `slot_shards` sources.
    """
    if slot_shards is not None and integer(slot_shards, "slot_shards") < 1:
        raise PlanError(f"slot_shards {slot_shards}: it must be at least 1")
    schedule = parse(schedule) if isinstance(schedule, str) else schedule
    if schedule == AUTO:
        return auto(cp, slot_shards or SLOT_SHARDS)
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


def parse(words: str) -> str | Schedule:
    """Read a name in `NAMES`, or a schedule from text such as "0,1,2,2". Raises `PlanError` for
    other text, and as `check` does.
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
    """Raise `PlanError` unless `hops` maps the ring distances of `cp` ranks to hops as described
    above. With None, the number of ranks is not checked.
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
    """Return a schedule as settings and messages show it: its name, or its hops as in 0,1,2,2."""
    return schedule if isinstance(schedule, str) else ",".join(map(str, schedule))


def group_sizes(hops: Schedule) -> list[int]:
    """Return the number of sources of each hop from hop 1 on."""
    return [int(size) for size in np.bincount(hops)[1:]]


def auto(cp: int, slot_shards: int = SLOT_SHARDS) -> Schedule:
    """Return the schedule for masks whose ranks read most keys of most others: 2 sources in the
    first remote hop, whose transfer must hide behind the rank's own keys, then `slot_shards` in
    each.

    So hops do not grow with the number of ranks, and neither does memory. The fastest of all
    schedules with so many sources a hop is about a hundredth faster, for causal and full masks.
    """
    first = min(2, slot_shards, cp - 1)
    later = (2 + place // slot_shards for place in range(cp - 1 - first))
    return (0, *[1] * first, *later)


def ring_distance(rank: Ints | int, owner: Ints | int, cp: int) -> Any:
    """Return the ring distance of `rank` from `owner`, (rank - owner) mod cp; numbers or int64
    arrays.
    """
    number: Any = rank - owner
    return number + cp * (number < 0)  # divisions of many numbers take much longer
