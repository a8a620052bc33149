"""Masks against masks painted pair by pair, their words, and what they reject."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_ring.plan import Mask
from tests.rings import said

windows = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 9))] * 2)


def painted(n, offsets, window, causal, prefixes=None):
    """The mask, from its definition."""
    left, right = window
    allowed = np.zeros((n, n), bool)
    for document, (start, end) in enumerate(pairwise(offsets)):
        for i in range(start, end):
            last = end - 1 if right < 0 else i + right
            last = min(last, i) if causal else last
            last = last if prefixes is None else max(last, start + prefixes[document] - 1)
            for j in range(start, end):
                allowed[i, j] = (left < 0 or j >= i - left) and j <= last
    return allowed


def assert_sees(mask, wanted):
    """The mask has the pairs that are wanted, and counts them."""
    assert np.array_equal(mask.dense(), wanted)
    assert mask.area() == wanted.sum()


@st.composite
def offsets_of(draw):
    n = draw(st.integers(1, 30))
    return n, [0, *sorted(draw(st.lists(st.integers(0, n), max_size=4)))]


@settings(max_examples=200)
@given(case=offsets_of(), window=windows, causal=st.booleans())
def test_documents(case, window, causal):
    n, offsets = case
    mask = Mask.documents(offsets, causal=causal, window=window, n=n)
    wanted = painted(n, offsets, window, causal)
    assert_sees(mask, wanted)
    assert all(mask.allowed(i, j) == wanted[i, j] for i in range(0, n, 3) for j in range(n))


@settings(max_examples=200)
@given(data=st.data(), case=offsets_of(), window=windows)
def test_prefixes(data, case, window):
    n, offsets = case
    prefixes = [data.draw(st.integers(0, end - start)) for start, end in pairwise(offsets)]
    mask = Mask.prefix(n, prefixes, offsets, window)
    wanted = painted(n, offsets, window, causal=False, prefixes=prefixes)
    assert_sees(mask, wanted)


@settings(max_examples=50)
@given(n=st.integers(1, 30), window=windows)
def test_full_and_causal(n, window):
    assert_sees(Mask.full(n, window), painted(n, [0, n], window, causal=False))
    assert_sees(Mask.causal(n, window), painted(n, [0, n], window, causal=True))


@st.composite
def slices(draw):
    """Tokens, and slices (q0, q1, k0, k1, type) of any sizes, whose queries do not overlap."""
    n = draw(st.integers(1, 24))
    edges = sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=6)))
    made = []
    for q0, q1 in pairwise(edges):
        k0, k1 = sorted(draw(st.tuples(*[st.integers(0, n)] * 2)))
        made.append((q0, q1, k0, k1, draw(st.integers(0, 3))))
    return n, made


@settings(max_examples=200)
@given(case=slices(), named=st.booleans())
def test_slices(case, named):
    n, made = case
    wanted = np.zeros((n, n), bool)
    for q0, q1, k0, k1, kind in made:
        for i in range(q0, q1):
            for j in range(k0, k1):
                causal, inverse = j - k1 <= i - q1, j - k0 >= i - q0
                wanted[i, j] |= (True, causal, inverse, causal and inverse)[kind]
    table = np.array(made)
    names = ["full", "causal", "inv_causal", "bi_causal"]
    types = [names[kind] for kind in table[:, 4]] if named else table[:, 4]
    mask = Mask.from_ranges(table[:, :2], table[:, 2:4].tolist(), types, n)
    assert_sees(mask, wanted)


@settings(max_examples=100)
@given(case=offsets_of(), causal=st.booleans())
def test_the_last_document_sees_all(case, causal):
    n, offsets = case
    wanted = painted(n, offsets, (-1, -1), causal)
    last = [start for start, end in pairwise(offsets) if start < end][-1:]
    for start in last:
        wanted[start : offsets[-1], :start] = True
    mask = Mask.blockwise(offsets, causal, n)
    assert_sees(mask, wanted)
    assert mask.positions.tolist() == list(range(n))


@settings(max_examples=100)
@given(case=offsets_of(), block=st.integers(1, 9))
def test_block_causal_documents(case, block):
    n, offsets = case
    wanted = np.zeros((n, n), bool)
    for start, end in pairwise(offsets):
        for i in range(start, end):
            wanted[i, start : min(start + ((i - start) // block + 1) * block, end)] = True
    mask = Mask.block_causal(n, block, offsets)
    assert_sees(mask, wanted)
    assert np.array_equal(mask.positions, Mask.documents(offsets, n=n).positions)


def test_masks_describe_themselves():
    assert repr(Mask.block_causal(64, 16)) == "<Mask of 64 tokens, block causal, 2,560 pairs>"
    assert Mask.causal(64, (8, 0)).describe() == "causal, 540 pairs"


def test_area_of_a_long_mask_is_exact():
    n = 1 << 24
    assert Mask.causal(n).area() == n * (n + 1) // 2
    assert Mask.causal(n, (4096, 0)).area() == 4097 * n - 4096 * 4097 // 2


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mask.documents([1, 4]),
            r"cu_seqlens must start at 0 and not decrease, not \[1 4\]"),
        (lambda: Mask.documents([0, 9], n=8), "cu_seqlens ends at 9, past the 8 tokens"),
        (lambda: Mask.full(0), "a stream of 0 tokens"),
        (lambda: Mask.causal(8, (-2, 0)),
            r"window \(-2, 0\): each side must be -1 \(open\) or at least 0"),
        (lambda: Mask.causal(8, 1), r"window 1: it must be a pair \(left, right\)"),
        (lambda: Mask.prefix(8, [1, 2]), "2 prefix lengths for 1 documents"),
        (lambda: Mask.prefix(8, 9), "document 0 of 8 tokens has a prefix of 9"),
        (lambda: Mask.causal(8).allowed(0, 8), r"pair \(0, 8\) is outside the 8 tokens"),
        (lambda: Mask.from_pieces(8, [(0, 4, 0, 4), (3, 5, 2, 6)]),
         r"pieces 0 \(0, 4, 0, 4\) and 1 \(3, 5, 2, 6\) overlap; Mask.union joins"),
        (lambda: Mask.from_pieces(8, [(0, 4, 0, 9)]),
            r"piece 0 \(0, 4, 0, 9\) is outside the 8 tokens of the mask"),
        (lambda: Mask.from_pieces(8, [(0, 1, 0, 1), (4, 2, 0, 8)]),
            r"piece 1 \(4, 2, 0, 8\) ends before it begins"),
        (lambda: Mask.union(Mask.causal(4), Mask.causal(8)),
            "a union of masks of 4 tokens, 8 tokens: they must have one length"),
        (lambda: Mask.shared_prefix([(4, [2, -1])]),
            "branch 2 has -1 tokens: it must have 0 to"),
        (lambda: Mask.shared_prefix([(4, [2])], n=5), "have 6 tokens, but the stream has 5"),
        (lambda: Mask.tree([0], [4]), "branch 0 has parent 0: it must be -1 or a branch before it"),
        (lambda: Mask.images(8, [(2, 4), (3, 6)]), r"spans 2\.\.4 and 3\.\.6 overlap"),
        (lambda: Mask.images(8, [(2, 5)], [0, 4, 8]), r"span 2\.\.5 is not inside one document"),
        (lambda: Mask.block_causal(8, 0), "blocks of 0 tokens"),
        (lambda: Mask.from_ranges([(0, 4)], [(0, 4)], "bicausal"), "type 'bicausal' of a slice"),
        (lambda: Mask.block_diffusion(7, 2), "7 tokens have no two equal halves"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, message):
    assert re.search(message, said(make))
