"""Vectorized operations on many half-open ranges `[start, end)` at once, and checks of whole numbers."""

from __future__ import annotations

import hashlib
import operator

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError

Ints = NDArray[np.int64]


def integer(value: object, what: str) -> int:
    """`value` as an int. Raises `PlanError` if it is not a whole number: nothing is rounded."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PlanError(f"{what} {value!r} is not a whole number") from None


def integers(values: object, what: str) -> Ints:
    """`values` as an int64 array. Raises `PlanError` if they are not integers: nothing is rounded."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(
            f"{what} must be whole numbers, not {array.dtype} as in "
            f"{np.array2string(array.reshape(-1), threshold=8, edgeitems=3, max_line_width=999)}"
        )
    return array.astype(np.int64)


def sort_index(*keys: Ints) -> Ints | slice:
    """Index that sorts by the non-negative `keys`, the most significant first; `slice(None)` if they are sorted already."""
    key = keys[0]
    for minor in keys[1:]:
        span = int(minor.max(initial=0)) + 1
        if (int(key.max(initial=0)) + 1) * span > np.iinfo(np.int64).max:
            return np.lexsort(keys[::-1])
        key = key * span + minor
    return slice(None) if (key[1:] >= key[:-1]).all() else np.argsort(key, kind="stable")


def union(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each group, as (group, start, end): sorted, disjoint, and joined where they touch."""
    sort = sort_index(group, start)
    group, start, end = group[sort], start[sort], end[sort]
    base = group * (int(end.max(initial=0)) + 1)
    reach = np.maximum.accumulate(end + base)
    first = np.flatnonzero(np.append(True, (start + base)[1:] > reach[:-1])[: len(group)])
    last = np.append(first[1:], len(group))[: len(first)] - 1
    return group[first], start[first], (reach - base)[last]


def overlaps(start: Ints, end: Ints, edges_start: Ints, edges_end: Ints) -> tuple[Ints, Ints]:
    """All pairs (range, cell) that overlap. The cells `[edges_start, edges_end)` must be sorted and disjoint."""
    first = np.searchsorted(edges_end, start, side="right")
    count = np.maximum(np.searchsorted(edges_start, end, side="left") - first, 0)
    return expand(first, count)


def expand(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Pairs (i, number): for each i, the `count[i]` numbers that start at `first[i]`."""
    which = np.repeat(np.arange(len(first)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count - first, count)


def digest(*parts: bytes) -> str:
    """Of the bytes of all parts together, as hexadecimal text."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
