"""Schedules: the hop at which a rank works on the keys of each other rank.

A schedule is a tuple that maps ring distance to hop: rank r works on the keys of rank (r - d) mod cp at hop `schedule[d]`.
A rank's own keys, distance 0, are alone in hop 0. The hops do not decrease with the distance, and none is left out.

The keys of one hop lie end to end in one receive buffer. So tiles of several sources over the same queries become one
kernel call with one merge, and the gradients of their keys are made in one call too. The price is memory: a buffer holds
as many shards as its hop has sources.

| name     | schedule at cp 6      | meaning                                                           |
|----------|-----------------------|-------------------------------------------------------------------|
| `ring`   | `(0, 1, 2, 3, 4, 5)`  | One source a hop.                                                 |
| `gather` | `(0, 1, 1, 1, 1, 1)`  | All remote sources in one hop, as after an all-gather.            |
| `auto`   | `(0, 1, 2, 2, 2, 2)`  | Chosen by a model of the time; see `auto`. This is the default.   |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import integer

Schedule = tuple[int, ...]

SLOT_SHARDS = 4
"""Sources of the largest hop of `auto`, by default."""

FLOPS_PER_SECOND = 4e14
"""What an attention kernel reaches on an H100, by default."""

NETWORK_BYTES_PER_SECOND = 4e10
"""What a rank receives from other nodes, by default: a network card of 400 Gb/s."""

NVLINK_BYTES_PER_SECOND = 3e11
"""What a rank receives from other ranks of its node."""

# The layer that `auto` plans for: 32 query heads and 8 key/value heads of size 128, in bf16. Tensor parallelism and the
# batch size change all of these alike.
_FLOPS_PER_PAIR = 4 * 32 * 128
_BYTES_PER_KEY = 2 * 2 * 8 * 128
_BYTES_MERGED_PER_QUERY = 32 * 128 * (2 + 4 + 4)  # the call's out is read, the running float32 out is read and written
MEMORY_BYTES_PER_SECOND = 3e12
"""What an H100 reads and writes, by default."""

SECONDS_PER_CALL = 2e-5
"""What a kernel call loses while its first and last blocks do not fill the device."""

_NAMED: dict[str, Callable[[int], Schedule]] = {
    "ring": lambda cp: tuple(range(cp)),
    "gather": lambda cp: (0,) + (1,) * (cp - 1),
}

NAMES = ("auto", *_NAMED)
"""Schedules that flags and settings can name."""


def resolve(
    schedule: str | Sequence[int], cp: int, tokens: int, slot_shards: int | None = None, *, one_source: bool = False
) -> Schedule:
    """The schedule of a plan, checked.

    Args:
        schedule: a name in `NAMES`, a sequence of hops by ring distance, or such a sequence as text, "0,1,2,2".
        cp: the number of ranks.
        tokens: tokens of the largest shard (of one batch row, where shards hold several), which `auto` needs.
        slot_shards: the most sources of a hop. None is no limit, but `SLOT_SHARDS` for `auto`.
        one_source: `auto` means `ring`, for routes that pass keys from neighbor to neighbor.

    Raises `PlanError` for an unknown name, and for a schedule that does not start with hop 0 alone, decreases, leaves out a
    hop, has another length than `cp`, or has a hop of more than `slot_shards` sources.
    """
    if slot_shards is not None and integer(slot_shards, "slot_shards") < 1:
        raise PlanError(f"slot_shards {slot_shards}: it must be at least 1")
    schedule = parse(schedule) if isinstance(schedule, str) else schedule
    if schedule == "auto":
        return _NAMED["ring"](cp) if one_source else auto(cp, tokens, slot_shards or SLOT_SHARDS)
    hops = _NAMED[schedule](cp) if isinstance(schedule, str) else tuple(integer(hop, "a hop of schedule") for hop in schedule)
    check(hops, cp)
    largest = max(group_sizes(hops), default=0)
    if slot_shards is not None and largest > slot_shards:
        raise PlanError(
            f"schedule {text(schedule)}: a hop has {largest} sources, but slot_shards is {slot_shards}: raise slot_shards to "
            f"{largest}, or choose another schedule"
        )
    return hops


def relay_schedule(schedule: str | Sequence[int], cp: int, node_size: int) -> Schedule:
    """The schedule of the route `relay`, whose ranks pass keys on inside a node: the keys of each other node take 3 hops.

    Counted by `Order`, where rank r of a node comes first to the keys of rank r of another node, at hop t, then to those of
    the others, at hop t + 1, and last to those of rank r + 1, at hop t + 2, which is hop t of the next node. On nodes of two
    ranks t + 1 is the last. The keys of the rank's own node come at hop 1, with the first ones from another node.

    `schedule` must be `auto` or this one. Raises `PlanError` if it is not.
    """
    node, place = np.divmod(np.arange(cp), node_size)
    if node_size in (1, cp):
        return resolve(schedule, cp, 1) if schedule != "auto" else _NAMED["ring"](cp)
    hop = node + (place == 1) if node_size == 2 else 2 * node - 1 + (place > 0) + (place == node_size - 1)
    hop[:node_size] = np.arange(node_size) > 0
    hops = tuple(hop.tolist())
    given = parse(schedule) if isinstance(schedule, str) else tuple(schedule)
    if given not in ("auto", hops):
        raise PlanError(f"schedule {text(schedule)}: the route relay has a schedule of its own, leave schedule out")
    return hops


def parse(given: str) -> str | Schedule:
    """A name in `NAMES`, or a tuple from text such as "0,1,2,2". Raises `PlanError` for other text, and as `check` does."""
    given = given.strip()
    if given in NAMES:
        return given
    try:
        hops = tuple(int(hop) for hop in given.split(","))
    except ValueError:
        raise PlanError(
            f"schedule {given!r}: known are {', '.join(NAMES)}, or the hop of each ring distance as in 0,1,2,2"
        ) from None
    check(hops)
    return hops


def check(hops: Schedule, cp: int | None = None) -> None:
    """Raises `PlanError` unless `hops` maps the ring distances of `cp` ranks (None: of any number) to hops as described above."""
    shown = f"schedule {text(hops)}"
    if cp is not None and len(hops) != cp:
        raise PlanError(f"{shown}: {len(hops)} hops for {cp} ranks; it needs the hop of each ring distance, 0 to {cp - 1}")
    if not hops or hops[0] != 0 or 0 in hops[1:]:
        raise PlanError(f"{shown}: hop 0 is for a rank's own keys, so ring distance 0 must be at hop 0, and no other distance")
    for distance, (before, hop) in enumerate(pairwise(hops), 1):
        if hop < before:
            raise PlanError(f"{shown}: it decreases from hop {before} to hop {hop} at ring distance {distance}")
        if hop > before + 1:
            raise PlanError(f"{shown}: it leaves out hop {before + 1}, before ring distance {distance}")


def text(schedule: str | Sequence[int]) -> str:
    """A schedule as settings and messages show it: its name, or its hops as in 0,1,2,2."""
    return schedule if isinstance(schedule, str) else ",".join(map(str, schedule))


def group_sizes(hops: Schedule) -> list[int]:
    """The number of sources of each hop from hop 1 on."""
    return [int(size) for size in np.bincount(hops)[1:]]


@lru_cache(maxsize=1024)
def auto(
    cp: int,
    tokens: int,
    slot_shards: int = SLOT_SHARDS,
    flops_per_second: float = FLOPS_PER_SECOND,
    bytes_per_second: float = NETWORK_BYTES_PER_SECOND,
) -> Schedule:
    """The schedule of least time by a model, with at most `slot_shards` sources a hop.

    `bytes_per_second` is what a rank receives. By default it is that of a network card, also for few ranks: with tensor
    parallelism inside the nodes, context parallelism crosses them.

    The model is the rank of a causal zigzag plan to which most is sent: each source costs as much compute as the rank's
    own keys, and all of its shard travels. A hop's keys travel while the hop before it is computed. So a hop of b sources
    after one of a sources makes the rank wait for `b * transfer - a * compute`, if that is positive; each hop costs a
    kernel call and a merge besides. Schedules are compared under three rules:

    - The transfer of the first remote hop hides behind the rank's own keys, if that of one shard can.
    - Hops do not get smaller from one to the next.
    - The last hop has `slot_shards` sources if there are more remote ones than that, so that memory does not grow with cp.

    The one of least time is found by dynamic programming; of equal ones that with the smaller first hops.

    Masks that need less than whole shards (windows, documents) send what they need under any schedule, and their buffers
    are smaller. So the schedule depends on nothing but the arguments, and all ranks choose the same one without a message.
    Times are whole nanoseconds, so that every machine computes the same.
    """
    remote = cp - 1
    largest = min(slot_shards, remote)
    if not remote:
        return (0,)
    compute = round(1e9 * tokens**2 / 2 * _FLOPS_PER_PAIR / flops_per_second)
    transfer = round(1e9 * tokens * _BYTES_PER_KEY / bytes_per_second)
    call = round(1e9 * (SECONDS_PER_CALL + tokens * _BYTES_MERGED_PER_QUERY / MEMORY_BYTES_PER_SECOND))
    never = np.iinfo(np.int64).max // 4
    size = np.arange(1, largest + 1)
    # [a, b]: nanoseconds that a hop of b sources adds after one of a sources.
    added = call + np.maximum(size * transfer - size[:, None] * compute, 0)
    added[size < size[:, None]] = never
    # [left, a]: least time of all later hops, after a hop of a sources and with `left` sources to come.
    after = np.full((remote + 1, largest), never)
    after[0] = 0 if remote <= slot_shards else np.where(size == largest, 0, never)
    chosen = np.zeros((remote + 1, largest), np.int64)
    for left in range(1, remote + 1):
        fits = min(left, largest)
        times = added[:, :fits] + after[left - size[:fits], size[:fits] - 1]
        chosen[left] = times.argmin(1)
        after[left] = np.minimum(times.min(1), never)
    first = times[0, : max(compute // max(transfer, 1), 1)] if compute >= transfer else times[0]
    chosen[remote, 0] = first.argmin()
    hops, left, last = [0], remote, 0
    while left:
        last = int(chosen[left, last])
        hops += [hops[-1] + 1] * (last + 1)
        left -= last + 1
    return tuple(hops)
