"""ring_attention under every mask, layout and route, against brute force in float64, on real processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, RingPlan
from cp_ring.plan.routes import ROUTES
from cp_ring.testing.oracle import Case, Grads, brute_force, error, on_rank, whole

N = 157  # no multiple of anything: shards are uneven
DOCUMENTS = [0, 1, 40, 40, 77, 120, 150]  # lengths 1 and 0, and a tail of padding
MASKS = {
    "causal": Mask.causal(N),
    "full": Mask.full(N),
    "causal window": Mask.causal(N, window=(19, 0)),
    "symmetric window": Mask.full(N, window=(7, 30)),
    "documents": Mask.documents(DOCUMENTS, n=N),
    "full documents": Mask.documents(DOCUMENTS, causal=False, n=N),
    "documents and window": Mask.documents(DOCUMENTS, window=(11, 0), n=N),
    "prefix": Mask.prefix(N, 50),
    "document prefixes and window": Mask.prefix(N, [1, 10, 0, 37, 5, 30], cu_seqlens=DOCUMENTS, window=(16, 0)),
}


def layouts(mask: Mask, cp: int) -> dict[str, Layout]:
    return {
        "zigzag": Layout.zigzag(N, cp),
        "contiguous": Layout.contiguous(N, cp),
        "balanced": Layout.balanced(mask, cp),
    }


# Schedules of the largest group; smaller ones take what begins it.
SCHEDULES = [("direct", "ring"), ("direct", "gather"), ("direct", (0, 1, 2, 2)), ("ring", "ring"), ("ring", (0, 1, 1, 2))]


@pytest.mark.parametrize(("route", "schedule"), SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_brute_force(pool, mask, route, schedule):
    mask = MASKS[mask]
    case = Case.draw(N, h=4, g=2, d=16)
    truth = brute_force(case, mask.dense())
    for cp in (1, 2, 3, 4):
        for name, layout in layouts(mask, cp).items():
            hops = schedule if isinstance(schedule, str) else schedule[:cp]
            plan = RingPlan.build(mask, layout, route, hops)
            plan.verify()
            got = whole(layout, pool.run(on_rank, cp, case, plan))
            errors = {part: error(x, y) for part, x, y in zip(Grads._fields, got, truth, strict=True)}
            assert max(errors.values()) < 3e-6, (cp, name, errors)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_kernels_agree_on_a_hard_mask(pool, kernel):
    """Lowered to full and causal squares, or as bands: the same numbers in float64."""
    mask = MASKS["document prefixes and window"]
    case = Case.draw(N, b=2, dtype=torch.float64)
    plan = RingPlan.build(mask, Layout.zigzag(N, 4))
    got = whole(plan.layout, pool.run(on_rank, 4, case, plan, kernel=kernel))
    assert all(error(x, y) < 1e-12 for x, y in zip(got, brute_force(case, mask.dense()), strict=True))


def test_padding_gives_zeros_and_gets_no_gradient(pool):
    plan = RingPlan.build(MASKS["documents"], Layout.zigzag(N, 4))
    got = whole(plan.layout, pool.run(on_rank, 4, Case.draw(N), plan))
    for x in got:
        assert (x[:, DOCUMENTS[-1] :] == 0).all()
        assert (x[:, : DOCUMENTS[-1]] != 0).any()


def test_rows_with_different_documents_are_one_stream(pool):
    """b rows of n tokens, each with documents of its own: the plan is for the stream of b * n tokens."""
    n, rows = 48, [[0, 20, 48], [0, 7, 9, 40]]
    masks = [Mask.documents(row, n=n) for row in rows]
    case = Case.draw(n, b=2)
    truth = [brute_force(Case(*(x[[i]] for x in case)), mask.dense()) for i, mask in enumerate(masks)]
    layout = Layout.zigzag(n, 4)
    plan = RingPlan.build(Mask.batch(masks), Layout.batch([layout] * 2))
    plan.verify()
    parts = pool.run(on_rank_of_rows, 4, case, plan, layout)
    for i, name in enumerate(Grads._fields):
        got = layout.unshard([part[i] for part in parts], 1)
        assert error(got, torch.cat([row[i] for row in truth])) < 3e-6, name


def on_rank_of_rows(group, case, plan, layout):
    from cp_ring import ring_attention

    q, k, v, dout = (layout.shard(x, group.rank(), 1) for x in case)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, group, plan=plan)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize(("route", "schedule"), [*((route, "ring") for route in ROUTES), ("direct", "auto"), ("ring", "gather")])
@pytest.mark.parametrize("mask", ["causal", "causal window", "documents"])
def test_counted_bytes_are_the_plans(pool, mask, route, schedule):
    """The transport of a real run counts, rank by rank, the bytes that the report of the proof gives."""
    n, cp, g, d = 4096, 4, 2, 8
    rng = np.random.default_rng(0)
    mask = {
        "causal": Mask.causal(n),
        "causal window": Mask.causal(n, window=(255, 0)),
        "documents": Mask.documents(np.append(np.sort(rng.choice(n, 20)) * (np.arange(20) > 0), n)),
    }[mask]
    plan = RingPlan.build(mask, Layout.zigzag(n, cp), route, schedule)
    report = plan.verify()
    token = g * (d + d) * 4
    for rank, (_, counters) in enumerate(pool.run(on_rank, cp, Case.draw(n, h=2, g=g, d=d), plan)):
        assert counters.bytes_by_kind.get("keys", 0) == 2 * token * report.keys_out[rank].sum()
        assert counters.bytes_by_kind.get("gradients", 0) == token * report.grads_out[rank].sum()
    full_ring = n * (cp - 1)
    assert report.keys_out.sum() < (0.76 if route == "direct" else 1.0) * full_ring


@pytest.mark.parametrize("mask", ["causal", "full", "documents"])
def test_one_source_a_hop_is_any_schedule_to_rounding(pool, mask):
    """The schedule changes the order of sums, and nothing else."""
    mask, case = MASKS[mask], Case.draw(N, h=4, g=2, d=16, dtype=torch.float64)
    layout = Layout.zigzag(N, 4)
    plans = [RingPlan.build(mask, layout, schedule=schedule) for schedule in ("ring", "auto", "gather", (0, 1, 1, 2))]
    first, *others = (whole(layout, pool.run(on_rank, 4, case, plan)) for plan in plans)
    for other in others:
        assert all(error(x, y) < 1e-14 for x, y in zip(other, first, strict=True))
