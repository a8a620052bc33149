"""A hop's kernel calls, single and packed, against brute force."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, RingPlan
from cp_ring.kernels.base import Capabilities
from cp_ring.kernels.calls import Statistics, _Packed, kernel_calls
from cp_ring.kernels.reference import KERNEL
from cp_ring.plan import OPEN, Tile
from cp_ring.plan.mask import paint
from cp_ring.plan.tables import Hop
from cp_ring.plan.tiles import Tiles
from cp_ring.testing.oracle import Case, Grads, brute_force, error

CAPABILITIES = [Capabilities(bands, 0, varlen) for bands in (False, True) for varlen in (False, True)]


def hop_of(tiles: Tiles, shift=0) -> Hop:
    keys = int(tiles.k1.max())
    return Hop(0, 0, tiles, keys, None, (), keys + 8, np.full(len(tiles), shift), (), ())


def run(hop: Hop, case: Case, capabilities: Capabilities, shift: int = 0) -> Grads:
    q, k, v, dout = (x.transpose(0, 1).double() for x in case)
    out, lse = torch.zeros_like(dout), torch.full((q.shape[1], q.shape[2], q.shape[0]), -math.inf, dtype=torch.float64)
    calls = kernel_calls(hop, capabilities)
    for call in calls:
        call.merge_(out, lse, *call.attend(KERNEL, q, k, v, 0.25))
    dq, (dk, dv) = torch.zeros_like(q), (torch.zeros(x.shape[0] + 8, *x.shape[1:], dtype=x.dtype) for x in (k, v))
    for call in calls:
        call.add_(dq, dk, dv, *call.gradients(KERNEL, dout, q, k, v, out, Statistics(lse), 0.25))
    tokens = slice(shift, shift + k.shape[0])
    assert not dk[: tokens.start].any()
    assert not dk[tokens.stop :].any()
    return Grads(*(x.transpose(0, 1) for x in (out, dq, dk[tokens], dv[tokens])))


def random_tiles(generator: np.random.Generator, n: int) -> Tiles:
    """Bands on rectangles that share no query; keys overlap."""
    cuts = np.unique(np.concatenate([[0, n], generator.integers(1, n, 6)])).tolist()
    bands = []
    for q0, q1 in pairwise(cuts):
        k0, k1 = sorted(generator.choice(n + 1, 2, replace=False).tolist())
        kind, height = generator.integers(5), min(q1 - q0, n - k0)
        if kind == 0:
            bands.append((q0, q1, k0, k1, -OPEN, OPEN))
        elif kind == 1:
            bands.append((q0, q0 + height, k0, k0 + height, -OPEN, k0 - q0))
        elif kind == 2:
            bands.append((q0, q0 + height, k0, k0 + height, k0 - q0, OPEN))
        elif kind == 3:
            lo = int(generator.integers(-n, n))
            bands.append((q0, q1, k0, k1, lo, lo + int(generator.integers(0, n))))
    return Tiles.of(bands or [(0, n, 0, n, -OPEN, OPEN)])


@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=str)
@pytest.mark.parametrize("b", [1, 2])
def test_random_tiles(capabilities, b):
    for seed in range(5):
        n = 40
        tiles = random_tiles(np.random.default_rng(seed), n)
        case = Case.draw(n, b=b, h=4, g=2, d=8, e=12, seed=seed, dtype=torch.float64)
        truth = brute_force(case, paint(tiles, n, n) > 0, scale=0.25)
        shift = seed % 8
        keys = int(tiles.k1.max())
        seen = Case(case.q, case.k[:, :keys], case.v[:, :keys], case.dout)
        got = run(hop_of(tiles, shift), seen, capabilities, shift)
        for name, x, y in zip(Grads._fields, got, truth, strict=True):
            y = y[:, : x.shape[1]]
            assert float((x - y).abs().max()) < 1e-12, (name, seed)


def documents(count: int, size: int) -> list[int]:
    return np.cumsum([0, *np.random.default_rng(0).integers(3, 2 * size, count).tolist()]).tolist()


@pytest.mark.parametrize("window", [(-1, 0), (9, 0)])
@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=str)
def test_packed_documents(capabilities, window):
    cu = documents(12, 16)
    plan = RingPlan.build(Mask.documents(cu, window=window), Layout.contiguous(cu[-1], 1))
    case = Case.draw(cu[-1], dtype=torch.float64)
    got = run(plan.rank_plan(0).hops[0], case, capabilities)
    for x, y in zip(got, brute_force(case, plan.mask.dense(), scale=0.25), strict=True):
        assert error(x, y) < 1e-12


@pytest.mark.parametrize("window", [(-1, 0), (1, 0)])
def test_calls_do_not_grow_with_documents(window):
    """Side by side, they are one call on a slice of tokens: nothing is gathered."""
    for count in (8, 64):
        cu = documents(count, 16)
        hop = RingPlan.build(Mask.documents(cu, window=window), Layout.contiguous(cu[-1], 1)).rank_plan(0).hops[0]
        (call,) = kernel_calls(hop, Capabilities(bands=True, varlen=True))
        assert isinstance(call, _Packed)
        assert call.q.index is call.k.index is call.grad.index is None
        assert (call.left, call.right) == window
        assert len(kernel_calls(hop, Capabilities(bands=True))) == count


def test_kernel_calls_are_made_once_and_die_with_their_hop():
    import gc
    import weakref

    hop = hop_of(Tiles.of([Tile(0, 8, 0, 8)]))
    capabilities = Capabilities()
    assert kernel_calls(hop, capabilities) is kernel_calls(hop, capabilities)
    gone = weakref.ref(hop)
    del hop
    gc.collect()
    assert gone() is None
