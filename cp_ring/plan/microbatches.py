"""Which batch rows of a step share a microbatch: an order in which all microbatches, and all
data-parallel ranks, work alike.

A step has `ranks * microbatches` microbatches of equally many batch rows. They are filled by
longest processing time first. Then swaps between the fullest one and another lower the maximum.
Microbatches go to ranks in the same way, by longest time first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints

MAX_SWAPS = 256
"""Swaps between microbatches of one step at most."""

Work = NDArray[np.float64]


def balanced_order(work: Work) -> Ints:
    """The batch row, by its number in reading order, at each place: int64, of the shape of `work`.

    work: of the row at each place, [ranks, microbatches, rows of a microbatch], not negative.

    The order as read stays where another one makes neither the longest microbatch nor the longest
    rank shorter. Raises `PlanError` for another shape, or work that is negative or not a number.
    """
    if work.ndim != 3 or 0 in work.shape or not np.isfinite(work).all() or (work < 0).any():
        raise PlanError(
            "work must be finite and not negative, [ranks, microbatches, rows], not an array "
            f"{work.shape}"
        )
    ranks, microbatches = work.shape[:2]
    flat = work.reshape(-1)
    filled = _swapped(_longest_first(flat, ranks * microbatches), flat)
    load = flat[filled].sum(1)
    order = filled[np.sort(_longest_first(load, ranks), 1)]
    as_read = np.arange(flat.size).reshape(work.shape)
    better = [
        new < old * (1 - 1e-9)
        for new, old in zip(_longest(flat[order]), _longest(work), strict=True)
    ]
    worse = [
        new > old * (1 + 1e-9)
        for new, old in zip(_longest(flat[order]), _longest(work), strict=True)
    ]
    return order if any(better) and not any(worse) else as_read


def imbalance(work: Work) -> tuple[float, float]:
    """Work of the longest microbatch, and of the longest rank, over the mean; `work` is that of
    `balanced_order`.
    """
    mean = work.sum(2).mean()
    microbatch, rank = _longest(work)
    return (microbatch / mean, rank / (mean * work.shape[1])) if mean else (1.0, 1.0)


def _longest(work: Work) -> tuple[float, float]:
    return float(work.sum(2).max()), float(work.sum((1, 2)).max())


def _longest_first(work: Work, groups: int) -> Ints:
    """Members of each group, int64 [groups, len(work) / groups]: the largest first, each to the
    least loaded group with room.
    """
    room = len(work) // groups
    members, count, load = (
        np.zeros((groups, room), np.int64),
        np.zeros(groups, np.int64),
        np.zeros(groups),
    )
    for item in np.argsort(-work, kind="stable"):
        group = int(np.argmin(np.where(count < room, load, np.inf)))
        members[group, count[group]] = item
        count[group] += 1
        load[group] += work[item]
    return members


def _swapped(members: Ints, work: Work) -> Ints:
    """The groups after swaps of one member of the fullest with one of another group, as long as
    they lower its load.
    """
    members = members.copy()
    for _ in range(MAX_SWAPS):
        held = work[members]
        load = held.sum(1)
        fullest = int(load.argmax())
        gain = held[fullest][:, None, None] - held[None]  # [rows of the fullest, groups, rows]
        after = np.maximum(load[fullest] - gain, load[None, :, None] + gain)
        after[:, fullest] = np.inf
        best = int(after.argmin())
        if after.flat[best] >= load[fullest] * (1 - 1e-9):
            break
        row, group, other = np.unravel_index(best, after.shape)
        members[fullest, row], members[group, other] = members[group, other], members[fullest, row]
    return members
