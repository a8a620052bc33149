"""The kernel calls of a pass. tests/plan and the proof hold their pairs."""

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import choose, work
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, brute_force, error

CP, N = 8, 256
CPU = torch.device("cpu")
MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "window": Mask.causal(N, (100, 0)),
    "documents": Mask.documents([0, 150, 170, N]),
}


@pytest.mark.parametrize("name", MASKS)
def test_calls_of_few_keys_are_right(monkeypatch, name):
    """Where query heads share keys, backward takes the keys of one shard at a time."""
    monkeypatch.setattr(work, "LONG", 1)
    mask, layout = MASKS[name], Layout.zigzag(N, CP)
    plan = Plan.build(mask, layout, schedule="gather")
    case = Case.draw(N, dtype=torch.float64)

    def on_rank(group):
        *leaves, dout = (layout.shard(x, group.rank, 1) for x in case)
        leaves = [x.requires_grad_() for x in leaves]
        out = ring_attention(*leaves, group, plan=plan)
        return out, *torch.autograd.grad(out, leaves, dout)

    parts = zip(*LocalRing(CP).run(on_rank), strict=True)
    for found, truth in zip(parts, brute_force(case, mask.dense()), strict=True):
        assert error(layout.unshard(list(found), 1), truth) < 1e-12


def test_only_backward_calls_are_cut():
    plan = Plan.build(Mask.full(CP * 16_384), Layout.zigzag(CP * 16_384, CP), schedule="gather")
    kernel = choose("cpu", device=CPU, dtype=torch.float32, d=8, e=8)
    keys, calls = {}, {}
    for few_keys in (False, True):
        made = work.work_of(plan.rank_plan(5), kernel, CPU, True, few_keys)
        every = [call.pairs().keys for hop in made.hops for call in made.calls[hop]]
        keys[few_keys], calls[few_keys] = max(map(np.size, every)), len(every)
    assert keys[True] == 16_384 < keys[False] and calls[False] < calls[True] == CP + 1
