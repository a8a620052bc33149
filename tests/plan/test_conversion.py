"""Conversions between layouts: the plan against a table of tokens, and mutated plans that the proof
must reject.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_ring.errors import PlanError
from cp_ring.plan.exchange.conversion import Conversion
from cp_ring.plan.layout import Layout


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    n, cp = draw(st.integers(1, 40)), draw(st.integers(1, 5))

    def layout() -> Layout:
        cuts = draw(st.sets(st.integers(1, n - 1), max_size=8)) if n > 1 else set()
        edges = np.array([0, *sorted(cuts), n])
        owner = draw(
            st.lists(st.integers(0, cp - 1), min_size=len(edges) - 1, max_size=len(edges) - 1)
        )
        return Layout(n, cp, edges, np.array(owner))

    return layout(), layout()


@given(two_layouts())
def test_every_token_goes_where_it_belongs_and_travels_only_where_it_must(layouts):
    before, after = layouts
    plan = Conversion.build(before, after)
    plan.verify()
    held = [before.positions(rank) for rank in range(before.cp)]
    got = [np.full(size, -1) for size in after.tokens_per_rank]
    for rank in range(before.cp):
        for source, target, count in plan.stays(rank):
            got[rank][target : target + count] = held[rank][source : source + count]
        for sent in plan.sends(rank):
            (received,) = (one for one in plan.receives(sent.peer) if one.peer == rank)
            out = np.concatenate([held[rank][start:end] for start, end in sent.ranges])
            for (start, end), part in zip(
                received.ranges,
                np.split(out, np.cumsum([end - start for start, end in received.ranges])[:-1]),
                strict=True,
            ):
                got[sent.peer][start:end] = part
    for rank in range(after.cp):
        assert got[rank].tolist() == after.positions(rank).tolist()
        stays = np.intersect1d(before.positions(rank), after.positions(rank))
        assert plan.traveling[:, rank].sum() == len(got[rank]) - len(stays)
    plan.inverse.verify()


@given(two_layouts(), st.data())
def test_the_proof_finds_mutations(layouts, data):
    plan = Conversion.build(*layouts)
    name = data.draw(st.sampled_from(["sender", "receiver", "source", "target", "tokens"]))
    column = getattr(plan, name).copy()
    column[data.draw(st.integers(0, len(column) - 1))] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    with pytest.raises(PlanError, match=r"^conversion: "):
        replace(plan, **{name: column}).verify()
    lost = {
        each: getattr(plan, each)[1:]
        for each in ("sender", "receiver", "source", "target", "tokens")
    }
    with pytest.raises(PlanError, match=r"token .* is moved 0 times"):
        replace(plan, **lost).verify()


def test_zigzag_to_contiguous_and_back():
    plan = Conversion.build(Layout.zigzag(16, 2), Layout.contiguous(16, 2))
    assert plan.traveling.tolist() == [[0, 4], [4, 0]]  # half of the tokens already lie right
    assert [(sent.peer, sent.ranges) for sent in plan.sends(0)] == [(1, ((4, 8),))]
    with pytest.raises(
        PlanError, match="layouts of 16 tokens on 2 ranks and 16 on 4: they must be equal"
    ):
        Conversion.build(Layout.zigzag(16, 2), Layout.contiguous(16, 4))
