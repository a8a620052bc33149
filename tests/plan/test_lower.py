"""Lowering adds little work."""

import numpy as np
import pytest

from cp_ring.plan import Capabilities, Layout, Mask, Plan, Tiles, lower
from cp_ring.plan.lower import BAND
from tests.plan import samples

BLOCK = 128


def blocks(tiles):
    """Blocks of 128 x 128, counted from each tile's corner, that a kernel touches."""
    total = 0
    for q0, q1, k0, k1, lo, hi in tiles:
        first = np.arange(q0, q1, BLOCK)
        last = np.minimum(first + BLOCK, q1) - 1
        left = np.maximum(k0, first + lo) - k0
        right = np.minimum(k1, last + hi + 1) - k0
        total += int(np.maximum(-(-right // BLOCK) - left // BLOCK, 0).sum())
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("window", [-1, 1024])
def test_documents_cost_at_most_15_percent_more_blocks(layout, seed, window):
    mask = Mask.documents(samples.exponential(65536, 1024, seed), window=(window, 0))
    chosen = Layout.zigzag(65536, 8) if layout == "zigzag" else Layout.balanced(mask, 8)
    tiles = Plan.build(mask, chosen).ring.tiles
    assert blocks(lower(tiles, Capabilities()).tiles) <= 1.15 * blocks(tiles)


def test_a_native_window_needs_no_lowering():
    plan = Plan.build(Mask.causal(32768, (1024, 0)), Layout.zigzag(32768, 4))
    tiles = plan.ring.tiles
    lowered = lower(tiles, Capabilities(bands=True))
    assert lowered.tiles == tiles.fitted() and lowered.parent.tolist() == list(range(len(tiles)))
    # What flash-attn calls (left, right), counted from the bottom right corner, is never negative.
    bands = lowered.tiles[lowered.kind == BAND]
    assert (bands.lo <= bands.k1 - bands.q1).all() and (bands.hi >= bands.k1 - bands.q1).all()


@pytest.mark.parametrize("width", [127, 255])
def test_strips_of_a_window_of_whole_blocks_share_no_key(width):
    """Two triangles of as many queries as the window would both have the key where they meet."""
    tiles = Tiles.of([(0, 1024, 0, 1024, -width, 0)])
    found = np.zeros((1024, 1024), int)
    for q0, q1, k0, k1, lo, hi in lower(tiles, Capabilities()).tiles:
        away = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
        found[q0:q1, k0:k1] += (lo <= away) & (away <= hi)
    away = np.arange(1024) - np.arange(1024)[:, None]
    assert np.array_equal(found, (-width <= away) & (away <= 0))
