"""Lowering adds little work."""

from __future__ import annotations

import numpy as np
import pytest

from cp_ring.plan import Capabilities, Layout, Mask, Plan, Tiles, lower
from cp_ring.plan.lower import BAND, KERNELS, call_groups
from tests.plan import samples

BLOCK = 128


def blocks(tiles: Tiles) -> int:
    """Blocks of 128 x 128, counted from each tile's corner, that a kernel touches."""
    total = 0
    for q0, q1, k0, k1, lo, hi in tiles:
        first = np.arange(q0, q1, BLOCK)
        last = np.minimum(first + BLOCK, q1) - 1
        left = np.maximum(k0, first + lo) - k0
        right = np.minimum(k1, last + hi + 1) - k0
        total += int(np.maximum(-(-right // BLOCK) - left // BLOCK, 0).sum())
    return total


def windowed(window: int, cp: int) -> Plan:
    return Plan.build(Mask.causal(32768, (window, 0)), Layout.zigzag(32768, cp))


@pytest.mark.parametrize("window", [1024, 1500, 2048, 4096, 5000])
@pytest.mark.parametrize("cp", [1, 4])
def test_windows_cost_at_most_15_percent_more_blocks(window: int, cp: int) -> None:
    tiles = windowed(window, cp).ring.tiles
    assert blocks(lower(tiles, Capabilities()).tiles) <= 1.15 * blocks(tiles)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("window", [-1, 1024])
def test_documents_cost_at_most_15_percent_more_blocks(layout: str, seed: int, window: int) -> None:
    mask = Mask.documents(samples.exponential(65536, 1024, seed), window=(window, 0))
    chosen = Layout.zigzag(65536, 8) if layout == "zigzag" else Layout.balanced(mask, 8)
    tiles = Plan.build(mask, chosen).ring.tiles
    assert blocks(lower(tiles, Capabilities()).tiles) <= 1.15 * blocks(tiles)


def test_a_native_window_needs_no_lowering() -> None:
    tiles = windowed(1024, 4).ring.tiles
    lowered = lower(tiles, Capabilities(bands=True))
    assert lowered.tiles == tiles.fitted() and lowered.parent.tolist() == list(range(len(tiles)))
    # What flash-attn calls (left, right), counted from the bottom right corner, is never negative.
    bands = lowered.tiles[lowered.kind == BAND]
    assert (bands.lo <= bands.k1 - bands.q1).all() and (bands.hi >= bands.k1 - bands.q1).all()


def test_narrow_bands_stay_bands_in_small_rectangles() -> None:
    lowered = lower(Mask.full(4096, (16, 16)).pieces, Capabilities(narrow_bands=64))
    bands = lowered.tiles[lowered.kind == BAND]
    assert (
        len(bands)
        and (bands.q1 - bands.q0 <= 128).all()
        and (bands.k1 - bands.k0 <= 128 + 32).all()
    )


def test_documents_of_a_hop_are_one_call_of_each_kind() -> None:
    plan = Plan.build(Mask.documents(samples.exponential(65536, 500, 0)), Layout.zigzag(65536, 8))
    diagonal = plan.ring.tiles[(plan.ring.tile_rank == 0) & (plan.ring.tile_hop == 0)]
    lowered = lower(diagonal, Capabilities(varlen=True))
    assert len(diagonal) > 8 and len(call_groups(lowered, varlen=True)) <= 4


def test_each_hop_of_full_documents_is_one_call() -> None:
    """Keys of several owners that the same queries see are one sequence of the call."""
    cu_seqlens = samples.one_long(65536, 700, 0)
    mask = Mask.documents(cu_seqlens, causal=False)
    owner = np.random.default_rng(0).permutation(256) % 16
    plan = Plan.build(mask, Layout(mask.n, 16, np.arange(0, mask.n + 1, 256), owner, "any"))
    tiles = 0
    for rank in range(16):
        for hop in plan.rank_plan(rank).hops:
            lowered = lower(hop.tiles, KERNELS["flash"])
            tiles += len(hop.tiles)
            assert len(call_groups(lowered, varlen=True)) == 1
    assert tiles > 400
