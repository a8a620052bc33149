"""The kernel calls of a pass. tests/plan and the proof hold their pairs."""

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels import choose, work
from cp_ring.kernels.base import Capabilities
from cp_ring.kernels.packed import PackedCall
from cp_ring.kernels.te_sizes import FewSizes
from cp_ring.plan.updates import Partial, query_updates
from cp_ring.testing.oracle import Case
from tests.rings import assert_right

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

    assert_right(plan, case)


def test_only_results_of_backward_wait_for_the_last_update():
    """Then its running total has all tokens, and there is no result before."""
    parts = [[Partial.of([(first, 64)])] for first in (0, 32, 32, 32, 32)]
    for backward in (False, True):
        early, *_, late = query_updates(parts, 64, backward)
        assert early.table[3].any() != backward and late.table[3].all()
        assert early.kept == late.kept == slice(0 if backward else 32, 64)


def test_all_results_wait_for_one_update_where_that_takes_no_more_memory():
    """At most three times the tokens, which a part and a running total in float32 take."""
    parts = [[Partial.of([(0, 64)])]] * 4
    assert [len(query_updates(parts[:count], 64, True)) for count in (3, 4)] == [1, 3]


def test_only_backward_calls_are_cut():
    plan = Plan.build(Mask.full(CP * 16_384), Layout.zigzag(CP * 16_384, CP), schedule="gather")
    kernel = choose("cpu", device=CPU, dtype=torch.float32, d=8, e=8)
    keys, calls = {}, {}
    for few_keys in (False, True):
        made = work.work_of(plan.rank_plan(5), kernel, CPU, True, few_keys)
        every = [call.pairs().keys for hop in made.hops for call in made.calls[hop]]
        keys[few_keys], calls[few_keys] = max(map(np.size, every)), len(every)
    assert keys[True] == 16_384 < keys[False] and calls[False] < calls[True] == CP + 1


@pytest.mark.parametrize(
    ("capabilities", "sizes"),
    [(Capabilities(), None), (Capabilities(varlen=True), FewSizes(2048, False))],
    ids=["single", "varlen"],
)
def test_each_part_of_the_own_keys_is_one_causal_call_in_backward(capabilities, sizes):
    """Of all queries, or of those from its first key on; packed ones are squares."""
    plan = Plan.build(Mask.causal(16_384), Layout.zigzag(16_384, 8))
    first, *_, last = plan.rank_plan(3).backward
    for hop, tall in ((first, True), (last, False)):
        (call,) = work.kernel_calls(hop, capabilities, sizes)
        assert call.hi == 0 and call.q.stop == 2048
        assert (call.q.stop - call.q.start > call.k.stop - call.k.start) == tall
    packed = work.kernel_calls(first, Capabilities(varlen=True), FewSizes(2048, True))
    assert len(packed) == 2 and all(isinstance(call, PackedCall) for call in packed)
