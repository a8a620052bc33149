"""Calls whose parts may have been cut for another layout are warned of, and calls that name no group
in a job of several ranks are one line: their numbers would be wrong.
"""

import pytest
import torch

import cp_ring
from cp_ring import Layout, Mask, Plan, cuts, ring_attention, roll, shard, unshard
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case
from tests.rings import said

N, CP = 48, 2
CASE = Case.draw(N)


def without_a_group(group):
    x = torch.ones(1, N, 2, 8)
    attend = (ring_attention, x, x, x)
    calls = [attend, (shard, x), (unshard, x), (roll, x, 1)]
    return [
        *(said(*call) for call in calls),
        *(said(*call, group=cp_ring.ALONE) for call in calls),
        *(said(*call, group=torch.distributed.group.WORLD) for call in calls[:1]),
        said(ring_attention, x, x, x, plan=Plan.build(Mask.full(N), Layout.zigzag(N, 1))),
        said(shard, x, Layout.zigzag(N, 1)),
    ]


def test_a_call_without_a_group_is_one_line_in_a_job_of_several_ranks(pool):
    for lines in pool.run(without_a_group, 4):
        assert all("group is not given, but this job has 4 ranks" in line for line in lines[:4])
        assert "group=dist.group.WORLD" in lines[0] and "group=cp_ring.ALONE" in lines[0]
        assert not any(lines[4:])
    x = torch.ones(1, N, 2, 8)
    assert said(ring_attention, x, x, x) == ""


LINE = "the 48 tokens were cut by Layout.* has Layout.*same layout="


@pytest.mark.parametrize("cut, attend", [
    ("contiguous", {}),
    (Layout.contiguous(N, CP), {"layout": None}),
    ("contiguous", {"layout": "zigzag"}),
    (None, {"layout": "contiguous"}),
])  # fmt: skip
def test_a_layout_that_shard_alone_has_is_a_warning(cut, attend):
    def case(group):
        parts = shard(CASE[:3], cut, group)
        calls = [(ring_attention, *parts, group)]
        if not attend.get("layout"):
            calls += [(unshard, parts[0], None, group), (roll, parts[0], -1, None, group)]
        for function, *inputs in calls:
            function(*inputs, **attend if function is ring_attention else {})
        return len(calls)

    with pytest.warns(UserWarning, match=LINE) as found:
        calls = LocalRing(CP).run(case)
    assert len(found) == sum(calls)


def test_cuts_are_kept_in_a_bounded_number():
    def case(group):
        for length in range(1, 3 * cuts._MANY):
            shard(torch.ones(1, 4 * length), None, group)
        return len(cuts._cuts_of(group))

    assert LocalRing(CP).run(case) == [cuts._MANY] * CP


def test_a_layout_of_its_own_is_taken_as_it_is():
    def case(group):
        shard(CASE[:3], "contiguous", group)
        layout = Layout.zigzag(N, CP)
        parts = [layout.shard(x, group.rank, 1) for x in CASE[:3]]
        ring_attention(*parts, group, causal=True, layout=layout)
        ring_attention(*parts, group, plan=Plan.build(Mask.causal(N), layout))
        return True

    assert all(LocalRing(CP).run(case))


def test_a_slice_of_parts_that_lie_together_is_right():
    """A buffer may hold the parts of all ranks."""
    layout = Layout.zigzag(N, CP)
    every = torch.cat([layout.shard(CASE.q, rank, 1) for rank in range(CP)], 1)

    def case(group):
        start = group.rank * N // CP
        q = every[:, start : start + N // CP]
        return ring_attention(q, q, q, group, causal=True)

    whole = ring_attention(CASE.q, CASE.q, CASE.q, causal=True)
    assert torch.allclose(layout.unshard(LocalRing(CP).run(case), 1), whole, atol=1e-5)
