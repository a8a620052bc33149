"""Packing: documents of any lengths pack and unpack to what went in."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cp_ring.errors import PlanError
from cp_ring.megatron.data.packing import pack
from tests.rings import refused

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@st.composite
def packings(draw):
    """Lengths, and how to pack them: few or many documents, short ones and some that are longer
    than a row.
    """
    capacity = draw(st.integers(8, 96))
    most = draw(st.sampled_from([1, 3, capacity // 4 + 1, capacity, 3 * capacity]))
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=40))
    return lengths, capacity, draw(st.sampled_from(["first-fit", "fill"]))


def check_packing(lengths, capacity, how):
    packing = pack(np.array(lengths), capacity, how, cut_long=True)
    assert packing.rows * capacity >= packing.length.sum() == sum(lengths)
    tokens = [np.arange(length) + 1000 * document for document, length in enumerate(lengths)]
    rebuilt = [[] for _ in lengths]
    for row in range(packing.rows):
        pieces, offsets = packing.pieces(row), packing.cu_seqlens(row)
        assert pieces and offsets[-1] == capacity and (np.diff(offsets) > 0).all()
        assert how != "fill" or len(offsets) == len(pieces) + 1 or row == packing.rows - 1, (
            "padding is in the last row alone"
        )
        stream = np.full(capacity, -1)
        for (document, start, length), at in zip(pieces, offsets.tolist(), strict=False):
            stream[at : at + length] = tokens[document][start : start + length]
        for (document, start, length), at in zip(pieces, offsets.tolist(), strict=False):
            rebuilt[document].append((start, stream[at : at + length]))
    for document, pieces in enumerate(rebuilt):
        joined = np.concatenate([part for _, part in sorted(pieces, key=lambda piece: piece[0])])
        assert np.array_equal(joined, tokens[document])
        assert len(pieces) == -(-lengths[document] // capacity) or how == "fill", (
            "no document is cut that fits into a row"
        )


@settings(max_examples=150, derandomize=True, **QUIET)
@given(packings())
def test_what_is_packed_is_unpacked(case):
    check_packing(*case)


def test_each_way_by_hand():
    lengths = np.array([3, 6, 4, 2, 5])
    assert [pack(lengths, 8).pieces(row) for row in range(3)] == [
        [(0, 0, 3), (4, 0, 5)],
        [(1, 0, 6), (3, 0, 2)],
        [(2, 0, 4)],
    ]
    assert pack(lengths, 8).cu_seqlens(2).tolist() == [0, 4, 8]
    # padding takes no time: it is no long document
    assert pack(np.array([3]), 3000).cu_seqlens(0).tolist() == [0, 3, 1027, 2051, 3000]
    fill = pack(lengths, 8, "fill")
    assert [fill.pieces(row) for row in range(3)] == [
        [(0, 0, 3), (1, 0, 5)],
        [(1, 5, 1), (2, 0, 4), (3, 0, 2), (4, 0, 1)],
        [(4, 1, 4)],
    ]
    assert fill.describe() == "5 documents in 3 rows of 8 tokens: 83.33 % filled"
    assert pack(np.array([9]), 8, cut_long=True).pieces(1) == [(0, 8, 1)]


def test_what_cannot_be_packed_is_one_line():
    assert "there is no document to pack" in refused(PlanError, pack, np.zeros(0, np.int64), 8)
    assert "document 1 has 9 tokens, more than the 8 of a row: make" in refused(
        PlanError, pack, np.array([4, 9]), 8
    )
