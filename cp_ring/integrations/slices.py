"""MagiAttention's slices of a mask: ranges of queries and keys with a type each.

`Mask.from_ranges` loads this when it is called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, Spans, range_pairs
from cp_ring.plan.tiles import OPEN

_SLICES = ("full", "causal", "inv_causal", "bi_causal")
"""The types of slices in `Mask.from_ranges`, by MagiAttention's number: bit 0 hides later keys from
earlier queries, bit 1 earlier keys from later queries.
"""


def pieces_of(
    q_ranges: Spans,
    k_ranges: Spans,
    types: Any,
) -> Ints:
    """Return the pieces of slices, int64 [slices, 6]; see `Mask.from_ranges`."""
    queries, keys = range_pairs(q_ranges, "q_ranges"), range_pairs(k_ranges, "k_ranges")
    kinds = [*types] if np.ndim(types) else [types] * len(queries)
    if not len(queries) == len(keys) == len(kinds):
        raise PlanError(
            f"{len(queries)} q_ranges, {len(keys)} k_ranges and {len(kinds)} types: give one "
            "of each for each slice, or one type for all"
        )
    (q0, q1), (k0, k1) = queries.T, keys.T
    number = np.array([_number_of(kind) for kind in kinds], np.int64)
    lo, hi = np.where(number & 2, k0 - q0, -OPEN), np.where(number & 1, k1 - q1, OPEN)
    return np.stack([q0, q1, k0, k1, lo, hi], 1)


def _number_of(kind: object) -> int:
    """Return the number of a type of slice, given its name, its number or a member of an enum."""
    kind = getattr(kind, "value", kind)
    for number, name in enumerate(_SLICES):
        if kind in (name, number):
            return number
    numbered = ", ".join(f"{name} ({number})" for number, name in enumerate(_SLICES))
    raise PlanError(f"type {kind!r} of a slice is not known: known are {numbered}")
