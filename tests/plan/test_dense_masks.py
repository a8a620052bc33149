"""Masks from dense arrays and from functions: exact, disjoint, and in as many pieces as the
documentation says.
"""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from cp_ring.integrations import dense_masks
from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan import mask as mask_module
from cp_ring.plan.tiles import paint
from launch.budget import ROOT
from tests.plan.strategies import masks
from tests.rings import said

PAGE = ROOT / "docs" / "masks-and-layouts.md"
TABLE = re.findall(r"^ +(\d+)  .*?: (.*)$", PAGE.read_text(), re.MULTILINE)
N = 256


@settings(max_examples=60)
@given(data=st.data(), n=st.integers(1, 24))
def test_any_array_becomes_disjoint_pieces(data, n):
    allowed = data.draw(st.one_of(arrays(bool, (n, n)), masks(n).map(Mask.dense)))
    made = Mask.from_dense(allowed)
    assert np.array_equal(paint(made.pieces, n, n), allowed)
    assert made.pieces == made.pieces.trimmed()


def test_the_documented_functions_have_as_many_pieces_as_documented(monkeypatch):
    monkeypatch.setattr(dense_masks, "_queries_at_once", lambda n: 100)
    assert len(TABLE) >= 5
    for pieces, words in TABLE:
        rule = eval("lambda q, k: " + words)
        made = Mask.from_mask_mod(lambda b, h, q, k, rule=rule: rule(q, k), N, max_pieces=10**6)
        allowed = rule(np.arange(N)[:, None], np.arange(N))
        assert np.array_equal(paint(made.pieces, N, N), allowed), words
        assert made.digest == Mask.from_dense(torch.from_numpy(allowed), 10**6).digest
        assert len(made.pieces) == int(pieces), words
        if len(made.pieces) <= mask_module.MAX_PIECES:
            Plan.build(made, Layout.zigzag(N, 4)).verify(rank_plans=True)


TABLES = {"document": torch.arange(N) // 11, "blocks": torch.arange(N)[:, None] % 3}
"""Tables that functions read by the index of a query: of numbers, and of rows of numbers."""

RULES = {
    "noop": noop_mask,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() < 5,
    "document": lambda b, h, q, k: TABLES["document"][q] == TABLES["document"][k],
    "best blocks": lambda b, h, q, k: (TABLES["blocks"][q] == k // 8).any(),
    "one number": lambda b, h, q, k: torch.tensor(True),
}


def _function(rules, join):
    functions = [RULES[name] for name in rules]
    if join == "of a BlockMask":
        return create_block_mask(and_masks(*functions), None, None, N, N, "cpu").mask_mod
    return (and_masks if join == "and" else or_masks)(*functions)


@settings(max_examples=60)
@given(
    rules=st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3),
    join=st.sampled_from(["and", "or", "of a BlockMask"]),
    n=st.integers(1, 40),
    at_once=st.integers(1, 40),
)
def test_functions_are_mapped_as_flex_attention_maps_them(rules, join, n, at_once):
    function = _function(rules, join)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_masks, "_queries_at_once", lambda n: at_once)
        made = Mask.from_mask_mod(function, n)
    wanted = create_mask(function, None, None, n, n, "cpu")[0, 0]
    assert np.array_equal(made.dense(), wanted.numpy())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mask.from_dense(np.eye(4)), "must be boolean.*, not float64"),
        (lambda: Mask.from_dense([True]), r"shape \[1\]: it must be \[n, n\]"),
        (lambda: Mask.from_dense(np.eye(9) > 0, max_pieces=0), "has 1 pieces, more"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: q - k, 4), "not int64"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: h == 0, 4),
            "mask_mod failed with TypeError: it depends on b or h; .*b and h have no value"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: q >= torch.stack([k, k]), 4),
            r"gives a tensor of shape \[2\] for a query and a key: it must be one boolean"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, message):
    assert re.search(message, said(make))


def test_a_function_that_takes_long_says_so(monkeypatch, caplog):
    clock = itertools.count(0, 2)  # seconds a look
    monkeypatch.setattr(dense_masks.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dense_masks, "_queries_at_once", lambda n: 8)
    for n, lines in ((16, 0), (64, 1)):
        caplog.clear()
        mask = Mask.from_mask_mod(lambda b, h, q, k: q >= k, n)
        assert mask.digest == Mask.causal(n).digest
        assert len(caplog.records) == lines
    assert "all 4.1e+03 pairs of 64 tokens, in about 16 s on cpu" in caplog.records[0].message
