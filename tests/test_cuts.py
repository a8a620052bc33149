"""Calls whose parts were cut for another layout, or that name no group in a job of several ranks,
are one line: their numbers would be wrong.
"""

from __future__ import annotations

import re

import pytest
import torch

import cp_ring
from cp_ring import Layout, Mask, Plan, ring_attention, roll, shard, unshard
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


LINE = "shard cut the 48 tokens by Layout.* has Layout.*same layout="


@pytest.mark.parametrize("cut", ["contiguous", Layout.contiguous(N, CP)])
@pytest.mark.parametrize("attend", [{}, {"layout": None}])
def test_a_layout_that_shard_alone_has_is_one_line(cut, attend):
    def case(group):
        parts = shard(CASE[:3], cut, group)
        return [
            said(ring_attention, *parts, group, causal=True, **attend),
            said(unshard, parts[0], group=group),
            said(roll, parts[0], -1, group=group),
        ]

    for lines in LocalRing(CP).run(case):
        assert all(re.search(LINE, line) for line in lines), lines


@pytest.mark.parametrize(("cut", "attend"), [("contiguous", "zigzag"), (None, "contiguous")])
def test_a_layout_that_attention_alone_has_is_a_warning(cut, attend):
    def case(group):
        ring_attention(*shard(CASE[:3], cut, group), group, causal=True, layout=attend)

    with pytest.warns(UserWarning, match=LINE):
        LocalRing(CP).run(case)


def test_a_layout_of_its_own_is_taken_as_it_is():
    def case(group):
        shard(CASE[:3], "contiguous", group)
        layout = Layout.zigzag(N, CP)
        parts = [layout.shard(x, group.rank, 1) for x in CASE[:3]]
        ring_attention(*parts, group, causal=True, layout=layout)
        ring_attention(*parts, group, plan=Plan.build(Mask.causal(N), layout))
        return True

    assert all(LocalRing(CP).run(case))


def test_slices_that_are_no_cut_of_the_sequence_are_left_alone():
    def case(group):
        together = torch.randn(1, N // CP, 3, 2, 8)  # q, k and v of one projection
        ring_attention(*together.unbind(2), group, causal=True)
        along = torch.randn(1, 3 * N // CP, 2, 8).chunk(3, 1)
        ring_attention(*along, group, causal=True)
        return True

    assert all(LocalRing(CP).run(case)) and all(LocalRing(3).run(case))
