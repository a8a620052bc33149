"""A whole group in one process: more ranks than this machine has cores."""

import numpy as np
import pytest

from cp_ring import Layout, Mask, Plan
from cp_ring.testing import local_ring
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.conformance import nan_memory
from tests.rings import FLOAT32, attend, attend_to_shard, error_of, refused, said

N = 128


@pytest.mark.parametrize(
    "cp, route, schedule",
    [
        (1, "direct", "auto"),
        (5, "direct", "ring"),
        (5, "ring", "gather"),
        (8, "ring", "ring"),
        (8, "direct", "auto"),
        (9, "ring", "gather"),
        (9, "direct", "ring"),
        (13, "direct", "auto"),
        (13, "ring", "ring"),
    ],
)
def test_many_ranks_equal_brute_force(cp, route, schedule):
    """Fresh memory holds NaN: a whole ring leaves no element unwritten, nor reads such a one. Each
    route is run with each kernel.
    """
    masks = (
        Mask.causal(N),
        Mask.documents([0, 3, 60, 61, 120], window=(30, 0), n=N),
        Mask.prefix(N, 40),
    )
    for number, mask in enumerate(masks, cp):
        plan = Plan.build(mask, Layout.zigzag(N, cp), route, schedule)
        case = Case.draw(N, b=2, h=6, g=3, d=11, e=7)
        with nan_memory():
            results = attend(case, plan, num_slots=3, kernel=("cpu", "reference")[number % 2])
        assert error_of(results, case, mask) < FLOAT32


def test_a_message_that_nobody_sends_is_given_up(monkeypatch):
    monkeypatch.setattr(local_ring, "TIMEOUT", 0.2)
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 2))

    def only_rank_0(group):
        return attend_to_shard(group, Case.draw(N), plan) if group.rank == 0 else None

    assert "rank 0 of a local ring waited 0.2 s for message 0 of rank 1" in said(
        LocalRing(2).run, only_rank_0
    )


def test_ranks_without_tokens():
    """A layout may leave ranks empty; with b > 1 too, their shards are just empty."""
    layout = Layout(N, 3, np.array([0, 50, N]), np.array([2, 0]))
    plan = Plan.build(Mask.causal(N), layout)
    plan.verify(rank_plans=True)
    case = Case.draw(N, b=2)
    assert error_of(attend(case, plan), case, plan.mask) < FLOAT32


def test_the_failure_of_a_rank_is_the_failure_of_all():
    plan = Plan.build(Mask.causal(N), Layout.zigzag(N, 3))

    def case(group):
        if group.rank == 2:
            raise RuntimeError("rank 2 is broken")
        return attend_to_shard(group, Case.draw(N), plan)

    assert "rank 2 is broken" in refused(RuntimeError, LocalRing(3).run, case)
