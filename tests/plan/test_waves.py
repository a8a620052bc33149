"""How calls fill processors: blocks counted from dense masks, and grids known by hand."""

import numpy as np
import pytest

from cp_ring.plan import Mask, Plan, PlanSpec
from cp_ring.plan.costs import waves
from cp_ring.plan.lower import BLOCK, KERNELS
from cp_ring.plan.plan import plan
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.tiles import OPEN, Tiles

SIZES = AttentionSizes(4, 2, 128, 128)


def tile(queries, keys, lo=-OPEN, hi=OPEN):
    return Tiles.columns(0, np.array([queries]), 0, keys, lo, hi)


@pytest.mark.parametrize(("blocks", "passes"), [(6, 1), (7, 2), (12, 2), (13, 3)])
def test_a_grid_that_is_no_multiple_of_the_processors(blocks, passes):
    found = waves._share([tile(blocks * BLOCK, 10 * BLOCK)], 1, False, 6)
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
    assert waves._makespan(np.array([1, 1, 1, 1, 4]), 2) == 4


def test_more_calls_fill_less_than_one():
    """Their blocks are those of the ring's own tiles: with a ring of one rank a call is one call."""
    n = 16_384
    whole, ring = (waves.filled(one, SIZES, KERNELS["flash"]) for one in plans(n))
    assert whole["forward"] == whole["one"] and 0.9 < whole["backward"] <= 1
    assert ring["forward"] < ring["one"] < 1 and ring["backward"] < 1


def plans(n) -> list[Plan]:
    return [plan(Mask.causal(n), cp, PlanSpec()) for cp in (1, 4)]
