"""How calls fill processors: blocks counted from dense masks, and grids known by hand."""

import heapq
from dataclasses import replace

import numpy as np
import pytest

from cp_ring.errors import PlanError
from cp_ring.plan import Mask, Plan, PlanSpec
from cp_ring.plan.costs import waves
from cp_ring.plan.costs.rank_updates import rank_updates
from cp_ring.plan.costs.simulate import simulate
from cp_ring.plan.lower import BLOCK, KERNELS
from cp_ring.plan.plan import plan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.plan.tiles import OPEN, Tiles

SIZES = AttentionSizes(4, 2, 128, 128)


def tile(queries, keys, lo=-OPEN, hi=OPEN):
    return Tiles.columns(0, np.array([queries]), 0, keys, lo, hi)


@pytest.mark.parametrize(("blocks", "passes"), [(6, 1), (7, 2), (12, 2), (13, 3)])
def test_a_grid_that_is_no_multiple_of_the_processors(blocks, passes):
    found = waves.share([tile(blocks * BLOCK, 10 * BLOCK)], 1, processors=6)
    assert found == pytest.approx(10 * blocks / (6 * passes * (10 + waves.BEGIN)))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("band", [(-OPEN, 0), (-300, 0), (-OPEN, OPEN), (0, OPEN), (-200, 77)])
def test_products_are_those_of_blocks_with_a_pair(backward, band):
    queries, keys = 900, 700
    q, k = np.arange(queries)[:, None], np.arange(keys)
    allowed = (k - q >= band[0]) & (k - q <= band[1])
    if backward:
        allowed = allowed.T
    expected = []
    for first in range(0, len(allowed), BLOCK):
        seen = np.flatnonzero(allowed[first : first + BLOCK].any(0))
        expected.append(-(-(seen[-1] + 1 - seen[0]) // BLOCK) if len(seen) else 0)
    assert waves._products(tile(queries, keys, *band), backward).tolist() == expected


def test_the_longest_blocks_come_first():
    assert waves._hand_out(np.array([1, 4]), np.array([4, 1]), np.zeros(2)) == 4


@pytest.mark.parametrize("processors", [1, 2, 7, 132])
def test_many_blocks_are_handed_out_as_one_by_one(processors):
    draw = np.random.default_rng(processors)
    for _ in range(20):
        durations = np.unique(draw.integers(1, 40, 6))
        counts = draw.integers(1, 4 * processors, len(durations))
        free = [0] * processors
        for duration in np.repeat(durations, counts)[::-1].tolist():
            heapq.heapreplace(free, free[0] + duration)
        assert waves._hand_out(durations, counts, np.zeros(processors)) == max(free)


@pytest.mark.parametrize("streams", [1, 2])
def test_calls_on_streams_in_turn_by_hand(streams):
    """Of 4 blocks on 3 processors, then 1, then 2, each of 10 products and a beginning. On two
    streams the second call begins at once, the third when the first one ends.
    """
    calls = [tile(count * BLOCK, 10 * BLOCK) for count in (4, 1, 2)]
    time = {1: 4, 2: 3}[streams] * (10 + waves.BEGIN)
    found = waves.share(calls, 1, processors=3, streams=streams)
    assert found == pytest.approx(7 * 10 / (3 * time))
    slow = waves.share(calls, 1, processors=3, least=100, streams=streams)
    assert slow == pytest.approx(7 * 10 / (3 * 300))


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_blocks_of_calls_are_handed_out_as_one_by_one(streams):
    draw = np.random.default_rng(streams)
    for _ in range(20):
        sizes = draw.integers(1, 30, (6, 2))
        free, ends = [0] * 7, [0] * streams
        for rows, keys in sizes.tolist():
            free, end = [max(x, ends[-streams]) for x in free], 0
            heapq.heapify(free)
            for _ in range(3 * rows):
                end = max(end, free[0] + keys + waves.BEGIN)
                heapq.heapreplace(free, free[0] + keys + waves.BEGIN)
            ends.append(end)
        calls = [tile(rows * BLOCK, keys * BLOCK) for rows, keys in sizes.tolist()]
        work = 3 * int(sizes.prod(1).sum())
        found = waves.share(calls, 3, processors=7, streams=streams)
        assert found == pytest.approx(work / (7 * max(ends)))


def test_more_calls_fill_less_than_one():
    """Their blocks are those of the ring's own tiles: with a ring of one rank a call is one call."""
    whole, ring = (
        waves.filled([rank_updates(one.rank_plan(0), KERNELS["flash"]).grids], 4, 132)
        for one in plans(16_384)
    )
    assert whole["forward"] == whole["one"] and 0.9 < whole["backward"] <= 1
    assert ring["forward"] < ring["one"] < 1 and ring["backward"] < 1


def test_predicted_times_are_those_of_the_blocks():
    """A call of a rank alone, by hand: with 3 processors and 4 heads."""
    rates = Rates(memory=1e30, call=1e-30, processors=3)
    one = plan(Mask.full(2 * BLOCK), 1, PlanSpec())
    found = simulate(one, one.verify(), SIZES, rates)
    # 8 blocks of 2 products: 3 rounds, and a beginning of each; the reference: 1,024 of 64
    rounds, reference = -(-1024 // 3), 64 / (64 + waves.BEGIN)
    expected = 3 * 3 * (2 + waves.BEGIN) / 16 * reference * 1024 / (3 * rounds)
    alone = (2 + waves.BEGIN) / 2 * reference * 1024 / (3 * rounds)
    pairs = SIZES.pair_flops[0] * (2 * BLOCK) ** 2 / rates.flops
    assert found.forward == pytest.approx(expected * pairs)
    assert found.efficiency_forward == pytest.approx(alone / expected) == pytest.approx(8 / 9)
    fixed = simulate(one, one.verify(), SIZES, replace(rates, processors=0))
    assert fixed.forward == pytest.approx(pairs)
    short = simulate(one, one.verify(), SIZES, replace(rates, call=1.0))
    assert short.forward == pytest.approx(1) and short.both == pytest.approx(2)


def test_speed_by_waves_of_the_shape_that_the_documentation_names():
    """8K tokens a rank, 32 and 8 heads of 128, cp 8 on one node of H100s."""
    sizes = AttentionSizes()
    whole = plan(Mask.causal(65_536), 8, PlanSpec(node_size=8))
    te = KERNELS["transformer_engine"]
    ranks = [rank_updates(whole.rank_plan(rank), te).grids for rank in range(8)]
    shares = waves.filled(ranks, 32, 132)
    assert shares["forward"] > 0.958 and shares["backward"] > 0.947 and shares["one"] > 0.983
    found = simulate(whole, whole.verify(), sizes, Rates(processors=132), 8, te)
    assert 0.945 < found.efficiency_forward < 0.975 and 0.94 < found.efficiency_both < 0.965


@pytest.mark.parametrize("processors", [-1, 1.5])
def test_a_number_of_processors_that_is_none(processors):
    with pytest.raises(PlanError, match=f"processors={processors}: it must be a whole number"):
        Rates(processors=processors)


def plans(n) -> list[Plan]:
    return [plan(Mask.causal(n), cp, PlanSpec()) for cp in (1, 4)]
