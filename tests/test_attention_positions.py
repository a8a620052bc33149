"""What depends on positions, dropout and ALiBi, is the same however the call is split, against brute
force in float64.
"""

from __future__ import annotations

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.kernels import dropout
from cp_ring.kernels.dropout import keep, mixed, philox
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error
from tests.rings import attend, off, truth

N, H, P, SEED = 48, 8, 0.3, 7
SLOPES = [2.0 ** -(head + 1) for head in range(H)]
CAUSAL, WINDOW = Mask.causal(N), Mask.causal(N, window=(9, 0))
DOCUMENTS, BOTH_WAYS = Mask.documents([0, 7, 30, N]), Mask.full(N, window=(12, 5))
PLANS = {
    "cp 1": Plan.build(CAUSAL, Layout.contiguous(N, 1)),
    "zigzag of 4": Plan.build(CAUSAL, Layout.zigzag(N, 4)),
    "window": Plan.build(WINDOW, Layout.zigzag(N, 2)),
    "documents, balanced": Plan.build(DOCUMENTS, Layout.balanced(DOCUMENTS, 4, 4)),
    "both ways": Plan.build(BOTH_WAYS, Layout.zigzag(N, 2)),
    "contiguous, ring": Plan.build(CAUSAL, Layout.contiguous(N, 4), route="ring", schedule="ring"),
    "relay": Plan.build(CAUSAL, Layout.zigzag(N, 4), route="relay", node_size=2),
    "gather": Plan.build(CAUSAL, Layout.zigzag(N, 4), schedule="gather"),
    "heads": Plan.build(CAUSAL, Layout.zigzag(N, 4), ulysses=2),
    "heads alone": Plan.build(CAUSAL, Layout.zigzag(N, 4), ulysses=4),
}
DROPOUT, ALIBI = {"dropout_p": P, "dropout_seed": SEED}, {"alibi_slopes": SLOPES}
OPTIONS = {"dropout": DROPOUT, "alibi": ALIBI, "both": DROPOUT | ALIBI}


def words(counter, key):
    return [f"{int(word):08x}" for word in philox(tuple(map(torch.tensor, counter)), key)]


def test_philox_is_that_of_its_authors():
    """The test vectors of Random123."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for counter, key, expected in (
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, ones << 32 | ones, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, 0x299F31D0 << 32 | 0xA4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        assert words(counter, key) == expected.split()


def test_weights_are_kept_as_often_as_asked_and_independently():
    row, position = torch.zeros(1, 256, dtype=torch.int64), torch.arange(256)[None]
    bits = keep(mixed(1), 0.25, list(range(8)), row, position, position)[0].double()
    assert abs(float(bits.mean()) - 0.75) < 0.003
    others = [
        keep(mixed(2), 0.25, list(range(8)), row, position, position)[0].double(),
        bits.roll(1, 0),
        bits.roll(1, 1),
        bits.mT,
    ]
    flat = (bits - bits.mean()).flatten()
    for other in others:
        assert abs(float(flat @ (other - other.mean()).flatten()) / len(flat) / 0.1875) < 0.01
    part = bits[5, 7:9, 100:]
    for batch_row, same in ((0, True), (3, False)):
        again = keep(
            mixed(1), 0.25, [5, 2], row[:, :2] + batch_row, position[:, 7:9], position[:, 100:]
        )
        assert torch.equal(again[0, 0].double(), part) is same


def bits_of_call(case):
    """The declared bits, bool [b, h, n, n], of whole batch rows."""
    b, n, h = case.q.shape[:3]
    row, position = torch.arange(b)[:, None].expand(b, n), torch.arange(n).expand(b, n)
    return keep(mixed(SEED), P, list(range(h)), row, position, position)


def wanted_of(case, mask, options):
    """out, dq, dk and dv in float64, with a dense bias and dense bits."""
    position = torch.arange(mask.n)
    distance = (position[:, None] - position).abs().double()
    bias = -torch.tensor(SLOPES, dtype=torch.float64)[:, None, None] * distance
    return truth(
        case,
        mask.dense(),
        bias=bias if "alibi_slopes" in options else 0.0,
        factors=bits_of_call(case).double() / (1 - P) if "dropout_p" in options else 1.0,
    )


@pytest.mark.parametrize("name", PLANS)
def test_bits_are_the_same_however_the_call_is_split(name):
    """With equal scores and a channel for each key, out shows the weights: zero where one is
    dropped, exactly.
    """
    zeros = torch.zeros(2, N, 4, 4)
    ones = torch.eye(N)[None, :, None].expand(2, -1, 4, -1).contiguous()
    case, plan = Case(zeros, zeros, ones, torch.zeros(2, N, 4, N)), PLANS[name]
    seen = torch.from_numpy(plan.mask.dense()) & bits_of_call(case)
    for kernel in ("reference", "cpu"):
        out = attend(case, plan, kernel=kernel, **DROPOUT)[0]
        assert torch.equal(out.transpose(1, 2) != 0, seen)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_are_those_of_brute_force(name, options):
    options, plan = OPTIONS[options], PLANS[name]
    case = Case.draw(N, b=2, h=H, g=4, d=8, e=12)
    wanted = wanted_of(case, plan.mask, options)
    for kernel, dtype, bound in (("reference", torch.float64, 1e-14), ("cpu", torch.float32, 2e-6)):
        typed = Case(*(x.to(dtype) for x in case))
        assert off(attend(typed, plan, kernel=kernel, **options), wanted) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_are_exact_in_16_bits(dtype):
    case, mask = Case.draw(640, h=2, g=1, d=4, dtype=dtype), Mask.causal(640)
    results = attend(case, Plan.build(mask, Layout.zigzag(640, 2)), **DROPOUT)
    assert off(results, wanted_of(case, mask, DROPOUT)) < 2e-2


def test_positions_are_those_of_the_batch_row():
    case = Case.draw(N, b=2, h=H, g=4, d=8)
    masks, options = [DOCUMENTS, CAUSAL], OPTIONS["both"] | {"alibi_slopes": torch.tensor(SLOPES)}
    layouts = [Layout.zigzag(N, 2), Layout.balanced(CAUSAL, 2, 4)]
    plan = Plan.build(Mask.batch(masks), Layout.batch(layouts))

    def on_rank(group):
        parts = [
            [layout.shard(x[row : row + 1], group.rank, 1) for row, layout in enumerate(layouts)]
            for x in case[:3]
        ]
        return ring_attention(*map(torch.cat, parts), group, plan=plan, **options)

    parts = LocalRing(2).run(on_rank)
    for row, (mask, layout) in enumerate(zip(masks, layouts, strict=True)):
        out = layout.unshard([part[row : row + 1] for part in parts], 1)
        assert error(out, wanted_of(case, mask, options)[0][row : row + 1]) < 2e-6


def test_scores_are_held_in_blocks(monkeypatch):
    case, plan = Case.draw(N, h=2, g=1, d=8), PLANS["window"]
    whole = attend(case, plan, **DROPOUT)
    monkeypatch.setattr(dropout, "_BLOCK", 100)
    assert off(attend(case, plan, **DROPOUT), whole) < 1e-6


PART = PLANS["cp 1"].rank_plan(0)
HALF = [0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"dropout_p": 1}, ConfigError, "dropout_p=1: it must be from 0 to below 1"),
        ({"dropout_seed": None}, ConfigError, "dropout_seed=None: dropout needs a whole number"),
        ({"plan": PART}, ConfigError, r"dropout_p=0\.1: give the plan of all ranks"),
        (
            {"kernel": "flash_aten"},
            KernelError,
            r"draws attention dropout by another rule|runs on CUDA",
        ),
        (
            {"alibi_slopes": [0.5]},
            PlanError,
            "alibi_slopes must hold one finite number for each of 2 query heads",
        ),
        (
            {"alibi_slopes": torch.ones(2, requires_grad=True)},
            ConfigError,
            "alibi_slopes are constants",
        ),
        (
            {"alibi_slopes": HALF, "plan": PART},
            ConfigError,
            "alibi_slopes: give the plan of all ranks",
        ),
        (
            {"alibi_slopes": HALF, "kernel": "flash_aten"},
            KernelError,
            r"has no ALiBi of tiles|runs on CUDA",
        ),
    ],
)
def test_what_cannot_be_is_rejected_in_one_line(options, kind, says):
    if "alibi_slopes" not in options:
        options = {"dropout_p": 0.1, "dropout_seed": 1} | options
    with pytest.raises(kind, match=says):
        ring_attention(*Case.draw(N, h=2, g=1, d=8)[:3], **{"plan": PLANS["cp 1"]} | options)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (lambda rank: {"dropout_p": 0.1 * rank, "dropout_seed": 1}, PlanError, "dropout_p"),
        (lambda rank: {"dropout_p": 0.1, "dropout_seed": rank}, PlanError, "dropout_seed"),
        (lambda rank: {"alibi_slopes": [0.5 + rank] * 4}, PlanError, "alibi_slopes"),
        (
            lambda rank: {"alibi_slopes": [0.5] * 4, "wire": "int8"},
            ConfigError,
            "wire='int8' does not support alibi_slopes, for which positions travel",
        ),
    ],
)
def test_ranks_that_cannot_go_together_are_rejected_in_one_line(options, kind, says):
    with pytest.raises(kind, match=says):
        LocalRing(2).run(
            lambda group: ring_attention(*Case.draw(8)[:3], group, **options(group.rank))
        )
