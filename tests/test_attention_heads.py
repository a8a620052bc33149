"""Heads exchanged among neighboring ranks, around the ring: against brute force in float64, on real
processes and in threads.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.attention import attention_of
from cp_ring.comm.transport import transport_for
from cp_ring.errors import ConfigError, PlanError
from cp_ring.inputs import AttentionOptions, Inputs, KeptOutput
from cp_ring.observe.counters import record
from cp_ring.plan import cost, split_heads
from cp_ring.plan.cost import bytes_between_nodes
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan_cache import PlanOptions
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, brute_force, error
from cp_ring.tools import bench_accuracy as accuracy
from tests.loopback import LoopbackTransport
from tests.rings import FLOAT32, attend, attend_to_shard, joined, off, same_bits, truth

FACTORS = [(2, 2), (4, 2), (4, 4)]
FACTORS_OF_THREADS = [(6, 2), (6, 3), (6, 6), (8, 2), (8, 4)]
GROUPED = [(12, 1), (12, 2), (12, 3), (12, 6)]


def masks(n: int) -> dict[str, Mask]:
    return {
        "causal": Mask.causal(n),
        "window": Mask.causal(n, window=(n // 4 + 3, 0)),
        "documents": Mask.documents([0, 5, n // 2, n - 3], n=n),
    }


def attend_to_many(
    group: Any, cases: list[tuple[Case, Plan, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    return [attend_to_shard(group, *case) for case in cases]


def every_case(
    cp: int, heads: int, d: int = 8, e: int = 12
) -> list[tuple[Case, Plan, torch.Tensor]]:
    n = 12 * cp
    return [
        (
            Case.draw(n, b=2, h=h, g=g, d=d, e=e),
            Plan.build(mask, layout, ulysses=heads),
            torch.linspace(-1, 2, h),
        )
        for h, g in GROUPED
        if not unsplit(h, g, heads)
        for name, mask in masks(n).items()
        for layout in [
            Layout.zigzag(n, cp),
            *([Layout.balanced(mask, cp)] if name == "documents" else []),
        ]
    ]


def check(case: Case, plan: Plan, sink: torch.Tensor, results: list[torch.Tensor]) -> None:
    plan.verify(rank_plans=True)
    wanted = truth(case, plan.mask.dense(), sink)
    assert off(results, wanted) < FLOAT32, (plan.mask, plan.layout, plan.ulysses, case.k.shape)


@pytest.mark.parametrize(("cp", "heads"), FACTORS)
def test_equals_brute_force(pool, cp, heads):
    """Masks, layouts, 1 to 6 key/value heads, sinks, values of another size than keys, several
    batch rows.
    """
    cases = every_case(cp, heads)
    by_rank = pool.run(attend_to_many, cp, cases)
    for number, case in enumerate(cases):
        check(*case, joined(case[1], [results[number] for results in by_rank]))


@pytest.mark.parametrize(("cp", "heads"), FACTORS_OF_THREADS)
def test_equals_brute_force_on_more_ranks(cp, heads):
    cases = every_case(cp, heads)
    by_rank = LocalRing(cp).run(attend_to_many, cases)
    for number, case in enumerate(cases):
        check(*case, joined(case[1], [results[number] for results in by_rank]))


@pytest.mark.parametrize(("h", "g"), [(8, 8), (24, 6)])
def test_groups_of_heads(h, g):
    """Several key/value heads a rank are exchanged and computed in 2 or 3 groups."""
    assert split_heads(h, g, 2).groups == (2 if g == 8 else 3)
    case, plan = (
        Case.draw(64, h=h, g=g, d=8),
        Plan.build(Mask.causal(64), Layout.zigzag(64, 4), ulysses=2),
    )
    sink = torch.linspace(-1, 1, h)
    check(case, plan, sink, attend(case, plan, sink=sink))


@pytest.mark.parametrize(
    "options", [{"route": "ring"}, {"schedule": "gather"}, {"schedule": (0, 1, 2, 2)}], ids=str
)
def test_routes_and_schedules_of_the_ring(options):
    case, plan = (
        Case.draw(96, h=4, g=2),
        Plan.build(Mask.causal(96), Layout.zigzag(96, 8), ulysses=2, **options),
    )
    sink = torch.zeros(4)
    check(case, plan, sink, attend(case, plan, sink=sink))


def _bytes_by_link(group, case, plan):
    """Bytes that a rank sends: (to the other node, inside its own)."""
    with record() as counters:
        attend_to_shard(group, case, plan)
    between = sum(
        size for peer, size in counters.bytes_by_peer.items() if peer // 2 != group.rank() // 2
    )
    return between, counters.bytes_sent - between


@pytest.mark.parametrize("heads", [1, 2])
def test_bytes_between_nodes_are_those_of_the_plan(pool, heads):
    """All ranks on 2 nodes of 2: keys in forward and again in backward, gradients once; heads are
    exchanged inside a node.
    """
    plan = Plan.build(Mask.full(64), Layout.zigzag(64, 4), ulysses=heads)
    parts = pool.run(_bytes_by_link, 4, Case.draw(64, h=4, g=2), plan)
    sizes = AttentionSizes(4, 2, 16, dtype="fp32")
    assert sum(between for between, _ in parts) == 3 * bytes_between_nodes(plan, sizes, 2)


def test_batch_rows_with_masks_of_their_own():
    n, offsets = 32, ([0, 11, 32], [0, 20, 32])
    rows = [Mask.documents(each) for each in offsets]
    layout = Layout.batch([Layout.balanced(mask, 4) for mask in rows])
    plan = Plan.build(Mask.batch(rows), layout, ulysses=2)
    case = Case.draw(n, b=2, h=4, g=2)

    def of_rank(group: Any) -> list[torch.Tensor]:
        mine = torch.from_numpy(layout.positions(group.rank))
        q, k, v, dout = (x.flatten(0, 1)[mine].unflatten(0, (2, -1)) for x in case)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, lse = ring_attention(q, k, v, group, plan=plan, return_lse=True)
        assert lse.shape == (2, 4, n // 4)
        return [x.flatten(0, 1) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]

    parts = LocalRing(4).run(of_rank)
    got = [layout.unshard([part[i] for part in parts], 0) for i in range(4)]
    stream = Case(*(x.flatten(0, 1)[None] for x in case))
    for x, y in zip(got, brute_force(stream, plan.mask.dense()), strict=True):
        assert error(x[None], y) < FLOAT32


def _by_default(group: Any, case: Case, between: float) -> tuple[list[Tensor], list[int]]:
    """Attention of two nodes of two ranks each, with links of so many bytes a second between
    nodes; and how many ranks exchanged heads.
    """
    n = case.q.shape[1]
    told, rates = os.environ.get("LOCAL_WORLD_SIZE"), cost.RATES
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    cost.RATES = replace(rates, between=between, call=1e-12)
    try:
        q, k, v, dout = (Layout.zigzag(n, 4).shard(x, group.rank(), 1) for x in case)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        options = PlanOptions(causal=True)
        made = options.find(transport_for(group, q.device), (q, k, v), False)
        out = ring_attention(q, k, v, group, causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)], [made.ulysses]
    finally:
        cost.RATES = rates
        os.environ.pop("LOCAL_WORLD_SIZE")
        if told is not None:
            os.environ["LOCAL_WORLD_SIZE"] = told


# of different lengths, because plans are kept
@pytest.mark.parametrize(("n", "between", "heads"), [(64, 1e12, 1), (96, 1e6, 2)])
def test_heads_of_two_nodes_are_chosen_by_their_links(pool, n, between, heads):
    """The default: the ring where links are fast, heads of the ranks of a node where those between
    nodes are slow; the results are the same.
    """
    case = Case.draw(n, b=2, h=4, g=2, seed=3)
    found = pool.run(_by_default, 4, case, between)
    assert [chosen for _, chosen in found] == [[heads]] * 4
    layout = Layout.zigzag(n, 4)
    for i, whole in enumerate(brute_force(case, np.tri(n, dtype=bool))):
        got = layout.unshard([parts[i] for parts, _ in found], 1)
        assert error(got, whole) < FLOAT32


def _kept_results(group, case, plan):
    """A recomputed block: the first run fills the results, the second takes them, and its gradients
    are those of one run.
    """
    q, k, v, dout = (plan.layout.shard(x, group.rank(), 1) for x in case)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    inputs, found = Inputs(q, k, v), []
    attention = attention_of(plan, group, AttentionOptions(), inputs)
    with torch.no_grad():
        kept = KeptOutput.of(attention(inputs))
    for given in (kept, None):
        with record() as counters:
            out = attention(inputs, given).out
            found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
        keys = counters.bytes_by_kind["keys"]
        found[-1].append(torch.tensor(keys))
    assert kept.nbytes
    return found


def test_recomputation_keeps_the_results(pool):
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), ulysses=2)
    for again, once in pool.run(_kept_results, 4, Case.draw(64, h=8, g=4), plan):
        assert same_bits(again[:4], once[:4])
        assert 2 * again[4] == once[4]  # keys went around the ring in backward only


def counted(group: Any, case: Case, plan: Plan) -> dict[str, int]:
    with record() as counters:
        attend_to_shard(group, case, plan)
    return counters.bytes_by_kind


@pytest.mark.parametrize(("h", "g"), [(4, 2), (4, 1)])
def test_bytes_of_the_exchange(pool, h, g):
    """q, k, v and out once each way: u - 1 of u parts of them leave; keys that ranks share go to
    each of them.
    """
    plan = Plan.build(Mask.causal(64), Layout.zigzag(64, 4), ulysses=2)
    for bytes_by_kind in pool.run(counted, 4, Case.draw(64, h=h, g=g, d=16), plan):
        queries, keys = 2 * 2 * h // 2, 2 * 2  # heads, of 16 tokens of 16 numbers
        assert bytes_by_kind["heads"] == (queries + keys) * 16 * 16 * 4


def test_as_accurate_as_one_call():
    """Of bfloat16, where gradients of shared key/value heads are rounded before they are added."""
    mask, n = Mask.causal(512), 512
    for cp, heads, h, g in ((4, 2, 4, 1), (4, 4, 4, 2), (8, 2, 4, 2)):
        plan, ratios = Plan.build(mask, Layout.zigzag(n, cp), ulysses=heads), []
        for seed in range(2):
            case = Case.draw(n, h=h, g=g, d=32, seed=seed, dtype=torch.bfloat16)
            exact = list(brute_force(case, mask.dense()))
            once = accuracy.errors(accuracy.one_call(mask, case, "cpu"), exact)
            ratios.append(accuracy.errors(attend(case, plan), exact) / once)
        out, *grads = torch.stack(ratios).mean(0)
        assert out <= 1.15 and max(grads) <= 1.10, (cp, heads, g, ratios)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"heads": 3}, PlanError, "heads=3: it must divide the 4 context-parallel ranks"),
        ({"heads": 4}, PlanError, "heads=4: it must divide the 6 query heads"),
        (
            {"heads": 2, "key_heads": 3},
            PlanError,
            "heads=2: it must divide the 3 key/value heads, or be a multiple of them",
        ),
        ({"heads": 0}, ConfigError, "heads=0: it must be a whole number above 0"),
        ({"heads": "all"}, ConfigError, "heads='all': it must be a whole number above 0"),
        (
            {"heads": 2, "plan": Plan.build(Mask.causal(64), Layout.zigzag(64, 4))},
            ConfigError,
            "heads and plan are both",
        ),
    ],
)
def test_bad_heads(options, kind, says):
    options = dict(options)
    q, k, v, _ = Case.draw(16, h=6, g=options.pop("key_heads", 2))
    with pytest.raises(kind, match=says):
        ring_attention(q, k, v, LoopbackTransport(0, 4), **options)


def test_ranks_with_other_heads_are_told():
    def other(group: Any) -> None:
        q, k, v, _ = Case.draw(16, h=4, g=2)
        ring_attention(q, k, v, group, causal=True, heads=2 if group.rank else 4)

    with pytest.raises(
        PlanError,
        match=r"ranks of the group make different calls: .*heads is 4 on rank 0 and 2 on rank \d",
    ):
        LocalRing(4).run(other)
