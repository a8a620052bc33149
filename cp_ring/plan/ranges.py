"""Vectorized operations on many half-open ranges `[start, end)` at once, and checks of whole
numbers.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError, one_line

Ints = NDArray[np.int64]
Integers = Sequence[int] | np.ndarray
Spans = Sequence[Sequence[int]] | np.ndarray
"""Lists of whole numbers, and of pairs (start, end), as callers give them."""

MAX_TOKENS = 1 << 30
"""The length of the longest stream. Positions, distances and numbers of pairs then fit into int64
with room to spare.
"""

FEW = 1024
"""Fewer numbers are sorted at once: to look at each key first would take longer."""


def integer(value: object, what: str) -> int:
    """Return `value` as an int. Raises `PlanError` if it is not a whole number: nothing is rounded,
    and True is not 1.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PlanError(f"{what} {value!r} is not a whole number") from None


def size_within(value: object, what: str, most: int, text: str) -> int:
    """Return `value`, the size called `what`, as an int from 1 to `most`.

    `text` begins the error, as in `a stream of 0 tokens: it must hold`.
    """
    if not 1 <= (size := integer(value, what)) <= most:
        raise PlanError(f"{text} at least 1" + f", at most {most}" * (size > 0))
    return size


def integers(values: object, what: str) -> Ints:
    """Return `values`, which may be a tensor on any device, as an int64 array.

    Raises `PlanError` if they are not integers of 64 bits: nothing is rounded or wraps around.
    """
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PlanError(f"{what} cannot be read as whole numbers: {one_line(error)}") from None
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"{what} must be whole numbers, not {array.dtype} as in {short(array)}")
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise PlanError(f"{what} must be whole numbers of 64 bits, not {short(array)}")
    return array.astype(np.int64)


def offsets(values: object, what: str, end: int | None = None) -> Ints:
    """Return the offsets of documents in a stream, int64 [documents + 1]: they start at 0, do not
    decrease, and end at `end` if that is given.

    Raises `PlanError` for other values: this is the check of every `cu_seqlens`.
    """
    edges = integers(values, what)
    if edges.ndim != 1:
        raise PlanError(
            f"{what} must be one list of offsets, not an array of shape {list(edges.shape)}"
        )
    if not len(edges) or edges[0] != 0 or (edges[1:] < edges[:-1]).any():
        raise PlanError(
            f"{what} must start at 0 and not decrease, not {short(edges)}; [0, 300, 420] are "
            "documents of 300 and 120 tokens"
        )
    if edges[-1] > MAX_TOKENS:
        raise PlanError(f"{what} ends at {edges[-1]}: a stream holds at most {MAX_TOKENS} tokens")
    if end is not None and edges[-1] != end:
        raise PlanError(
            f"{what} must end at the {end} tokens of the whole sequence, not at {edges[-1]}: "
            f"{short(edges)}"
        )
    return edges


def stream_length(n: int) -> int:
    return size_within(n, "n", MAX_TOKENS, f"a stream of {n} tokens: it must hold")


def documents_of(cu_seqlens: Integers, n: int | None) -> tuple[Ints, Ints, int]:
    """Return the checked starts and ends of documents, and the length of the stream."""
    edges = offsets(cu_seqlens, "cu_seqlens")
    n = stream_length(int(edges[-1]) if n is None else n)
    if edges[-1] > n:
        raise PlanError(f"cu_seqlens ends at {edges[-1]}, past the {n} tokens of the stream")
    return edges[:-1], edges[1:], n


def range_pairs(ranges: object, what: str) -> Ints:
    """Return `ranges`, which may be a tensor, as int64 [count, 2]. Raises `PlanError` for other
    shapes.
    """
    pairs = integers(ranges, what)
    pairs = pairs.reshape(0, 2) if not pairs.size else pairs
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise PlanError(f"{what} must be pairs (start, end), not an array of {list(pairs.shape)}")
    return pairs


def ordered_spans(spans: Spans, n: int) -> tuple[Ints, Ints]:
    """Return checked spans in ascending order as (starts, ends)."""
    pairs = range_pairs(spans, "spans")
    start, end = pairs[np.argsort(pairs[:, 0], kind="stable")].T
    check_all(
        (start >= 0) & (end <= n) & (start < end),
        lambda i: f"span {start[i]}..{end[i]} is empty or outside the {n} tokens of the stream",
    )
    check_all(
        end[:-1] <= start[1:],
        lambda i: f"spans {start[i]}..{end[i]} and {start[i + 1]}..{end[i + 1]} overlap",
    )
    return start, end


def window_of(window: tuple[int, int]) -> tuple[int, int]:
    """Return a window (left, right) as ints, with -1 for a side that is open or reaches further
    than any stream.

    Raises `PlanError` if `window` is not such a pair.
    """
    try:
        left, right = window
    except (TypeError, ValueError):
        raise PlanError(
            f"window {window!r}: it must be a pair (left, right), -1 for an open side"
        ) from None
    left, right = integer(left, "window side"), integer(right, "window side")
    if left < -1 or right < -1:
        raise PlanError(f"window ({left}, {right}): each side must be -1 (open) or at least 0")
    return -1 if left >= MAX_TOKENS else left, -1 if right >= MAX_TOKENS else right


def short(values: np.ndarray) -> str:
    """Show some of the values in one line."""
    return np.array2string(values.reshape(-1), threshold=8, edgeitems=3, max_line_width=1000)


def sort_index(*keys: Ints) -> Ints | slice:
    """Return the index that sorts by the non-negative `keys`, the most significant first;
    `slice(None)` if many are sorted already.
    """
    key = keys[0]
    if len(key) < FEW:
        return np.lexsort(keys[::-1])
    for minor in keys[1:]:
        span = int(minor.max(initial=0)) + 1
        if (int(key.max(initial=0)) + 1) * span > np.iinfo(np.int64).max:
            return np.lexsort(keys[::-1])
        key = key * span + minor
    return slice(None) if (key[1:] >= key[:-1]).all() else np.argsort(key, kind="stable")


def union(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the union of the ranges of each group as (group, start, end): sorted, disjoint, and
    joined where ranges touch.
    """
    sort = sort_index(group, start)
    group, start, end = group[sort], start[sort], end[sort]
    base = group * (int(end.max(initial=0)) + 1)
    reach = np.maximum.accumulate(end + base)
    first, last = runs((start + base)[1:] > reach[:-1], len(group))
    return group[first], start[first], (reach - base)[last]


def overlaps(start: Ints, end: Ints, edges_start: Ints, edges_end: Ints) -> tuple[Ints, Ints]:
    """Return all pairs (range, cell) that overlap. The cells `[edges_start, edges_end)` must be
    sorted and disjoint.
    """
    first = np.searchsorted(edges_end, start, side="right")
    count = np.maximum(np.searchsorted(edges_start, end, side="left") - first, 0)
    return expand(first, count)


def expand(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return pairs (i, number): for each i, the `count[i]` numbers that start at `first[i]`."""
    which = np.repeat(np.arange(len(first)), count)
    return which, np.arange(len(which)) - np.repeat(starts_of(count) - first, count)


def starts_of(size: Ints) -> Ints:
    """Return where parts of these sizes begin if they lie end to end."""
    return np.cumsum(size) - size


def runs(breaks: NDArray[np.bool_], count: int) -> tuple[Ints, Ints]:
    """Return the first and the last index of each run of `count` entries.

    breaks: bool [count - 1], True where a run ends between an entry and the next one.
    """
    first = np.flatnonzero(np.append(True, breaks)[:count])
    return first, np.append(first[1:], count)[: len(first)] - 1


def check_all(good: NDArray[np.bool_], message: Callable[[int], str]) -> None:
    """Raise `PlanError` with the message of the first index that is not `good`."""
    if not good.all():
        raise PlanError(message(int(np.flatnonzero(~good)[0])))


def digest(*parts: bytes) -> str:
    """Return the digest of the bytes of all parts together as hexadecimal text."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def depth(group: Ints, start: Ints, end: Ints, groups: int) -> Ints:
    """Return the most ranges `[start, end)` of each group that share a token, int64 [groups]."""
    base = group * (int(end.max(initial=0)) + 1)
    begins, order = base + start, np.argsort(base + start, kind="stable")
    before = np.searchsorted(np.sort(base + end), begins[order], "right")
    most = np.zeros(groups, np.int64)
    np.maximum.at(most, group[order], np.arange(1, len(order) + 1) - before)
    return most
