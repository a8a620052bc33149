"""Sampled steps: what a rank computes and waits for, and the slowest rank, by a clock that the test
sets.
"""

from types import SimpleNamespace

import pytest
import torch

import cp_ring
from cp_ring.comm.transport import Done
from cp_ring.megatron import step_timing
from cp_ring.observe import spans, timing
from cp_ring.observe.timing import RankTimes
from cp_ring.testing.local_ring import LocalRing


def times(rank, computing, group=0, waiting=0.0, plans=0.0):
    return RankTimes(rank, f"n{rank}", group, computing, waiting, plans)


def test_a_step_in_so_many_is_recorded_and_no_other():
    sampler = timing.Sampler(2)
    recorded = []
    for step in range(6):
        sampler.at(step)
        with spans.span("forward", SimpleNamespace(index=1)):
            spans.wait_for(Done())
        recording = sampler.close(step)
        recorded.append(recording and (recording.step, len(recording.computing)))
        sampler.at(step)  # evaluation after a step is no part of it
        assert timing.ACTIVE.value is None
    assert recorded == [None, None, (2, 1), None, (4, 1), None]


def test_attention_marks_its_hops_and_waits():
    timing.ACTIVE.value = recording = timing.Recording(1)

    def attend(group):
        x = torch.randn(1, 16, 2, 8, requires_grad=True)
        cp_ring.ring_attention(x, x, x, group, causal=True).sum().backward()

    LocalRing(2).run(attend)
    # two ranks, two hops, forward and backward
    assert len(recording.computing) >= 8 and len(recording.waiting) >= 4
    assert all(end >= begin for begin, end in recording.computing + recording.waiting)


def test_the_slowest_rank_is_found_in_its_group():
    """Ranks of another pipeline stage make other calls."""
    ranks = [times(0, 1.0), times(1, 1.0), times(2, 1.2), times(3, 9.0, 1), times(4, 9.0, 1)]
    found = timing.compared(7, ranks)
    assert (found.slowest.rank, found.slower) == (2, pytest.approx(1.2))
    assert found.line() == (
        "timing of step 7: attention computes 4240.0 ms and waits 0.0 ms (0.0%); "
        "slowest rank 2 (n2): +20%"
    )
    assert found.scalars()["slowest rank"] == 2.0


def test_a_rank_alone_is_not_slow():
    found = timing.compared(3, [times(0, 0.3, waiting=0.1, plans=0.02)])
    assert found.slowest is None and found.exposed == pytest.approx(0.25)
    assert found.line().endswith("waits 100.0 ms (25.0%); waited 20.0 ms for plans")


def test_the_last_rank_says_a_line_a_step_later(one_rank, monkeypatch, capsys):
    monkeypatch.setattr(step_timing.compat, "group_of", lambda *_: torch.distributed.group.WORLD)
    timing.SAMPLER.value = timing.Sampler(2)
    findings = []
    for step in range(1, 7):
        timing.at_step(step)
        with spans.span("forward", SimpleNamespace(index=1)):
            sum(range(1000))
        findings.append([each.step for each in step_timing.end_of_step(step, last=step == 6)])
    said = capsys.readouterr().out.splitlines()
    assert findings == [[], [], [2], [], [4], [6]] and len(said) == 3
    assert said[0].startswith("cp_ring: timing of step 2: attention computes ")
