"""FLOP, bytes and memory of plans, and the formula of time."""

import json
import re
from dataclasses import replace

import pytest
from pytest import approx

from cp_ring.kernels import REGISTRY
from cp_ring.memory import memory, rank_memory
from cp_ring.plan import Layout, Mask, Plan
from cp_ring.plan.lower import ASSUMED, call_groups, lower
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import FOLDER, NAMED, RATES
from cp_ring.plan.tiles import Tiles
from cp_ring.plan.time import Conditions
from cp_ring.tools.plan import summary
from launch.budget import ROOT
from tests.gpu.beside import CASES

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=16, value_dim=8, dtype="fp32")


def test_cost_by_hand():
    plan = Plan.build(Mask.full(8), Layout.contiguous(8, 2))
    facts = summary(plan, plan.verify(), Conditions(SIZES))
    # 16 pairs a hop, 4 heads, a multiply and an add for each element of q and v.
    assert facts["forward_flops_per_rank"] == [2 * 2 * 16 * 4 * 24] * 2
    assert facts["backward_flops_per_rank"] == [2 * 2 * 16 * 4 * (3 * 16 + 2 * 8)] * 2
    assert facts["bytes_in_per_rank"] == [4 * 2 * 24 * 4] * 2
    assert facts["memory"]["kept: lse"] == 4 * 4 * 4


def test_time_by_hand():
    """Two hops of 1 s each in forward, whose keys take 0.75 s in a node and 3 s beside it."""
    plan = Plan.build(Mask.full(8), Layout.contiguous(8, 2))
    flops, keys = 2 * 16 * 4 * 24, 4 * 2 * 24 * 4
    rates = replace(
        RATES,
        forward=flops,
        backward=flops,
        inside=keys / 0.75,
        between=keys / 3,
        call=1e-9,
        processors=1,
    )
    inside, between = (plan.time(Conditions(SIZES, rates, node)) for node in (2, 1))
    back = 2 * 16 * 4 * 64 / flops
    assert inside.forward == approx(2) and between.forward == approx(3 + 1)
    assert inside.waits[0] == approx(0, abs=1e-6)
    assert between.waits[0] == approx(2)
    # the keys come during half of hop 0, the gradients leave during the other half
    assert inside.both == approx(2 + 2 * back)
    assert between.both == approx(4 + 3 + back + 3)
    assert inside.ideal == approx(2 + 2 * back)


def test_heads_are_chosen_where_links_between_nodes_are_slow():
    given = Conditions()
    near = PlanSpec(choice=given).build(Mask.causal(1 << 17), 8)
    assert near.ulysses == 1, "the ring hides inside a node"
    short = Mask.full(1 << 15)
    far = PlanSpec(choice=given).build(short, 16)
    assert far.ulysses > 1 and given.heads_to_try(16) == [1, 2, 4, 8]
    chosen, alone = (PlanSpec(ulysses=heads).build(short, 16) for heads in (far.ulysses, 1))
    assert chosen.time(given).both < alone.time(given).both


@pytest.mark.parametrize(
    "cp, heads, kv_heads, ranks_per_node, wanted",
    [
        (8, 32, 8, 8, [1]),  # inside a node the ring
        (16, 32, 8, 8, [1, 2, 4, 8]),
        (32, 32, 8, 16, [1, 4, 8, 16]),  # at most four
        (12, 12, 12, 6, [1, 2, 3, 6]),
        (16, 9, 3, 8, [1]),
        (4, 8, 8, 2, [1, 2, 4]),  # and all ranks of two small nodes
        (16, 32, 8, 4, [1, 2, 4, 8]),
        (16, 4, 4, 8, [1, 2, 4]),
        (16, 32, 8, 1, [1]),  # of which nothing is known
    ],
)
def test_heads_to_try(cp, heads, kv_heads, ranks_per_node, wanted):
    given = Conditions(AttentionSizes(heads, kv_heads), node=ranks_per_node)
    assert given.heads_to_try(cp) == wanted


@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(4096),
        Mask.full(4096),
        Mask.causal(4096, (300, 0)),
        Mask.documents([0, 100, 900, 3100, 4096], causal=False),
        Mask.documents([0, 100, 900, 3100, 4096]),
        # two sequences have the keys of one prompt, and are calls of their own
        Mask.shared_prefix([(2000, [1048, 1048])]),
    ],
)
@pytest.mark.parametrize("schedule", ["auto", "ring", "gather"])
def test_calls_that_predictions_count_are_about_those_that_are_made(mask, schedule):
    """Predictions count the calls of one source of a hop, and take all bands for one kind."""
    plan = Plan.build(mask, Layout.zigzag(4096, 8), schedule=schedule)
    there = plan.time(Conditions(rates=replace(RATES, forward=1e30, call=1, processors=1))).there
    for rank in range(8):
        made = {
            hop.index: len(call_groups(lower(hop.tiles, ASSUMED), varlen=True))
            for hop in plan.rank_plan(rank).hops
        }
        for hop, counted in zip(there.hops[rank].tolist(), there.compute[rank, :-1], strict=True):
            assert made.get(hop, 0) / 3 <= round(counted) <= made.get(hop, 0)


def test_hops_without_work_take_no_time():
    """Their last gradients hide behind the second half of hop 0 as those of a hop of many sources."""
    mask = Mask.causal(4096, (400, 0))
    ring, gather = (
        Plan.build(mask, Layout.contiguous(4096, 8), schedule=name).time()
        for name in ("ring", "gather")
    )
    assert ring.forward == approx(gather.forward)
    assert ring.both == approx(gather.both)
    assert ring.there.hops[1, :2].tolist() == [0, 1]
    assert (ring.there.compute[0, 1:] == 0).all(), "the first rank has no key of another"
    compute, moving = ring.back.compute[1], ring.back.moving[1]
    assert compute[2] == compute[0] > 0 and moving[2] > 0 and not compute[3:].any()


def test_an_exchange_of_heads_hides_no_longer_than_attention_takes():
    """Two groups of heads: half of the exchange travels while the other group is computed."""
    sizes = AttentionSizes(heads=4, kv_heads=4, head_dim=16, dtype="fp32")
    numbers = 10 * 4 * 2 * 16  # of 10 tokens: q, k, v and out of the 2 heads of the other rank
    rates = replace(RATES, inside=numbers * 4 / 8, call=1e-9)
    times = [Conditions(sizes, rates, 2).exchange(10, 2, hides) for hides in (float("inf"), 3, 0)]
    assert times == approx([4, 5, 8], abs=1e-6)


def test_a_call_takes_as_long_as_its_longest_block():
    """One key that 1,024 queries see: in backward one of 8 processors computes it for a head."""
    mask = Mask(1025, Tiles.columns([1], [1025], [0], [1]))
    plan = Plan.build(mask, Layout.contiguous(1025, 1))
    there, back = (1024 * flops / 4 for flops in SIZES.pair_flops)  # of a head
    for processors in (1, 8):
        rates = replace(RATES, forward=1, backward=1, call=1e-9, processors=processors)
        time = plan.time(Conditions(SIZES, rates, 1))
        assert time.forward == approx(4 * there)  # 8 blocks of 128 queries for each head
        assert time.both - time.forward == approx(back * max(4, processors))


def _slowed(plan, **terms):
    """Seconds of forward, and of forward and backward, that these terms of the rates add."""
    rates = replace(RATES, inside=1e30, between=1e30)
    slow, known = (
        plan.time(Conditions(SIZES, each, 8)) for each in (replace(rates, **terms), rates)
    )
    return slow.forward - known.forward, slow.both - known.both


def test_what_a_hop_costs_beside_kernels_and_bytes():
    """Of two ranks, each with two hops: keys move once in each pass, gradients once."""
    plan = Plan.build(Mask.full(8), Layout.contiguous(8, 2))
    assert _slowed(plan, host=1) == approx((2, 2 + 4), abs=1e-3)
    assert _slowed(plan, start=1) == approx((1, 1 + 2), abs=1e-3)
    assert _slowed(plan, packed=1) == (0, 0), "each call has one sequence"
    # 4 tokens of 4 heads: a part, and a sum that is read and written; dq, dk and dv in backward
    out, dq, dkv = (4 * width * 12 for width in (4 * 8, 4 * 16, 2 * 24))
    added = _slowed(plan, merging=1, memory=1)
    assert added == approx((out, out + dq + dkv))
    packs = Plan.build(Mask.documents([0, 4, 8]), Layout.contiguous(8, 1))
    assert _slowed(packs, packed=1) == approx((1, 2))


def test_each_device_has_a_file_that_says_where_its_rates_are_from():
    """The first kernel of a file is that of the device's name."""
    page = (ROOT / "docs" / "routes.md").read_text()
    assert {"a100", "b200", "cpu", "h100", "h200", "h100-flash_aten"} <= set(NAMED)
    for name, rates in NAMED.items():
        device, _, kernel = name.partition("-")
        written = json.loads((FOLDER / f"{device}.json").read_text())
        assert written["source"].startswith("Assumed") or device == "cpu"
        kernel = kernel or next(iter(written["kernels"]))
        assert [rates.forward, rates.backward] == written["kernels"][kernel]
        assert kernel in REGISTRY and rates.backward <= rates.forward
        speeds = f"{rates.forward / 1e12:g}, {rates.backward / 1e12:g}"
        links = f"{rates.inside / 1e9:g}, {rates.between / 1e9:g}"
        assert (
            f"| `{name}` | {speeds} | {links} | {rates.memory / 1e9:g} |" in page or device != name
        )
        assert min(rates.forward, rates.inside, rates.between, rates.memory) > 0
        assert min(rates.call, rates.packed, rates.start, rates.host, rates.merging) >= 0


def test_predicted_memory_beside_that_of_the_fake_gpu():
    """Of the rings and of heads; docs/tune.md names the range. Only these ranks were measured. The
    caller holds q, k and v beside those of exchanged heads.
    """
    rows = json.loads((ROOT / "docs" / "benchmarks" / "beside.json").read_text())
    schedules = {"cp_ring": "auto", "cp_ring ring": "ring", "cp_ring heads": ""}
    ratios = []
    for row in rows:
        if row["case"] not in CASES or row["contestant"] not in schedules:
            continue
        case, cp, schedule = CASES[row["case"]], row["cp"], schedules[row["contestant"]]
        sizes = AttentionSizes(case.h, case.g, case.d, case.e)
        split = {"schedule": schedule} if schedule else {"ulysses": cp}
        width = 0 if schedule else sizes.query_width + sizes.key_width
        ends = case.ends(cp) if case.packed else [0, case.tokens * cp]
        mask = Mask.documents(ends, window=(case.window - 1 if case.window else -1, 0))
        plan = PlanSpec("zigzag", **split).build(mask, cp)
        held = [sum(rank_memory(plan, rank, sizes).values()) for rank in (0, cp // 2, cp - 1)]
        assert sum(memory(plan, sizes).values()) >= max(held)
        ratios.append(row["allocated"] / (max(held) + case.tokens * width * 2))
    assert len(ratios) == 36
    said = re.search(r"took ([\d.]+) to ([\d.]+) times", (ROOT / "docs" / "tune.md").read_text())
    assert [f"{x:.2f}" for x in (min(ratios), max(ratios))] == [*said.groups()]
    assert min(ratios) > 0.95 and max(ratios) < 1.05
