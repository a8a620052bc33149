"""Masks from dense arrays and from functions: exact, disjoint, and in as many pieces as the
documentation says.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cp_ring.errors import ConfigError, PlanError
from cp_ring.plan import Layout, Mask, Plan, dense_masks
from cp_ring.plan import mask as mask_module
from cp_ring.plan.dense_masks import paint
from tests.plan.strategies import masks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gallery.md"
TABLE = re.findall(r"^\| .* \| `(.*)` \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
N = 256


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 24))
def test_any_array_becomes_disjoint_pieces(data: st.DataObject, n: int) -> None:
    allowed = data.draw(st.one_of(arrays(bool, (n, n)), masks(n).map(Mask.dense)))
    made = Mask.from_dense(allowed)
    assert np.array_equal(paint(made.pieces, n, n), allowed)
    assert made.pieces == made.pieces.trimmed()


def test_the_documented_functions_have_as_many_pieces_as_documented(monkeypatch) -> None:
    monkeypatch.setattr(dense_masks, "_queries_at_once", lambda n: 100)
    assert len(TABLE) > 10
    for words, pieces in TABLE:
        rule = eval("lambda q, k: " + words.replace("\\|", "|"))
        made = Mask.from_mask_mod(lambda b, h, q, k, rule=rule: rule(q, k), N, max_pieces=10**6)
        allowed = rule(np.arange(N)[:, None], np.arange(N))
        assert np.array_equal(paint(made.pieces, N, N), allowed), words
        assert made.digest == Mask.from_dense(torch.from_numpy(allowed), 10**6).digest
        assert len(made.pieces) == int(pieces), words
        if len(made.pieces) <= mask_module.MAX_PIECES:
            Plan.build(made, Layout.zigzag(N, 4)).verify(rank_plans=True)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Mask.from_dense(np.eye(4)), PlanError, "must be boolean.*, not float64"),
        (lambda: Mask.from_dense(np.ones((2, 3, 3), bool)), PlanError, r"\[2, 3, 3\]: it must be"),
        (lambda: Mask.from_dense([True]), PlanError, r"shape \[1\]: it must be \[n, n\]"),
        (lambda: Mask.from_dense(np.ones((0, 0), bool)), PlanError, "a stream of 0 tokens"),
        (lambda: Mask.from_dense(np.eye(9) > 0, max_pieces=0), ConfigError, "has 1 pieces, more"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: q - k, 4), PlanError, "not int64"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: h == 0, 4), ConfigError,
            "mask_mod failed with TypeError: it is compared with b or h; b and h have no value"),
        (lambda: Mask.from_mask_mod(lambda b, h, q, k: q < torch.ones(2)[b], 4), ConfigError,
            "mask_mod failed with IndexError"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, kind, message) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
