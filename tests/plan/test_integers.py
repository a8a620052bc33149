"""Whole numbers at the ends of int64 and beyond: masks, layouts and plans are right, or rejected in
one line.
"""

import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.ranges import offsets
from tests.rings import said

N = 8
MAX = sys.maxsize
POWERS = [1 << power for power in (30, 31, 32, 60, 62, 63, 64, 100)]
ENDS = [sign * (power + more) for power in POWERS for more in (-1, 0, 1) for sign in (1, -1)]
NUMBERS = st.one_of(st.integers(-3, N + 2), st.sampled_from(ENDS))
ANY = st.one_of(
    NUMBERS,
    st.sampled_from([True, 2.0, 2.5, float("nan"), None, "3", np.int64(MAX), np.uint64(2**64 - 1)]),
)


def dense_or_none(make):
    made = []
    said(lambda: made.append(make().dense()))
    return made[0] if made else None


def pairs(allowed, n=N):
    """What a mask must allow, in Python's integers, which have no end."""
    return np.array([[allowed(i, j) for j in range(n)] for i in range(n)])


@example((-MAX - 1, MAX))
@example((-MAX, 0))
@example((MAX, MAX))
@given(st.tuples(NUMBERS, NUMBERS))
def test_bands_of_pieces(band):
    lo, hi = band
    fits = all(-(2**63) <= bound < 2**63 for bound in band)
    dense = dense_or_none(lambda: Mask.from_pieces(N, [(0, N, 0, N, lo, hi)]))
    assert (dense is None) == (not fits)
    if dense is not None:
        assert np.array_equal(dense, pairs(lambda i, j: lo <= j - i <= hi))
        once = Mask.from_pieces(N, [(0, N, 0, N, lo, hi)])
        assert Mask.union(once, once).area() == once.area() == dense.sum()


CALLS = {
    "from_pieces": lambda a, b: Mask.from_pieces(N, [(0, a, b, N)]),
    "from_pieces, n": lambda a, b: Mask.from_pieces(a, [(0, 1, 0, b)]),
    "prefix": lambda a, b: Mask.prefix(N, [a, b], [0, 3, N]),
    "tree": lambda a, b: Mask.tree([-1, a], [3, b]),
    "shared_prefix": lambda a, b: Mask.shared_prefix([(a, [b, b])]),
    "with_global": lambda a, b: Mask.with_global(N, [(a, b)], (1, 0)),
    "block_causal": lambda a, b: Mask.block_causal(N, a),
    "blockwise": lambda a, b: Mask.blockwise([0, a, b], n=N),
    "from_ranges": lambda a, b: Mask.from_ranges([(0, a)], [(0, b)], 1, N),
    "block_diffusion": lambda a, b: Mask.block_diffusion(N, a),
    "causal": lambda a, b: Mask.causal(a, (b, 0)),
    "zigzag": Layout.zigzag,
    "contiguous": Layout.contiguous,
    "per_document_zigzag": lambda a, b: Layout.per_document_zigzag([0, a], b),
    "balanced": lambda a, b: Layout.balanced([(Mask.causal(N), b)], a),
    "ranges": lambda a, b: Layout.zigzag(N, 2).ranges(a),
    "shard": lambda a, b: Layout.zigzag(N, 2).shard(torch.zeros(N, 1), a, b),
    "plan, slots": lambda a, b: Plan.build(Mask.causal(N), Layout.zigzag(N, 2), slot_shards=a),
    "heads": lambda a, b: Plan.build(Mask.causal(N), Layout.zigzag(N, 2), ulysses=a),
    "plan, schedule": lambda a, b: Plan.build(Mask.causal(N), Layout.zigzag(N, 2), schedule=(a, b)),
}


@pytest.mark.parametrize("name", CALLS)
@given(ANY, ANY)
def test_every_integer_parameter_is_right_or_rejected_in_one_line(name, a, b):
    numbers = [x for x in (a, b) if isinstance(x, int)]
    if "from_pieces, n" in name and max(numbers, default=0) > 1 << 29:
        return  # right, but a stream of a billion tokens
    made = []
    said(lambda: made.append(CALLS[name](a, b)))
    for mask in made:
        if isinstance(mask, Mask) and mask.n <= N + 2:
            assert mask.area() == mask.dense().sum()


@pytest.mark.parametrize(
    "wrong",
    [[], [5, 8], [8], [0, 5, 4, 8], [[0, 8]], [0, 4], [0, 9], [0.0, 8.0], [False, True], ["0", "8"], None, 8, [0, [8]],
     [0, 2**63], [0, MAX, -MAX, 8], np.array([0, 8], np.float32), np.array([0, 2**64 - 1], np.uint64), np.array(8)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("as_tensor", [False, True])
def test_offsets_are_rejected(wrong, as_tensor):
    if as_tensor:
        try:
            wrong = torch.tensor(wrong)
        except (TypeError, ValueError, RuntimeError):
            return  # torch has no such tensor
    assert "cu_seqlens" in said(offsets, wrong, "cu_seqlens", 8)
