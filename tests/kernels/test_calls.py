"""A hop's kernel calls, single and packed, against brute force."""

from __future__ import annotations

import math
import types
from itertools import pairwise

import numpy as np
import pytest
import torch

from cp_ring import Layout, Mask, Plan
from cp_ring.kernels.base import AttentionKernel, Capabilities
from cp_ring.kernels.calls import Statistics, _Packed, kernel_calls, work_of
from cp_ring.kernels.reference import KERNEL
from cp_ring.ops.totals import Merge, Sum
from cp_ring.plan import OPEN, Tile
from cp_ring.plan.dense_masks import paint
from cp_ring.plan.tables import Hop, RankPlan
from cp_ring.plan.tiles import Tiles
from cp_ring.testing.oracle import Case, Grads, brute_force, error

CAPABILITIES = [
    Capabilities(bands, 0, varlen) for bands in (False, True) for varlen in (False, True)
]


def alone(tiles: Tiles, shift=0) -> RankPlan:
    """A plan of one rank, whose hop 0 has these tiles. Keys are `shift` tokens later in the
    gradient buffer.
    """
    tokens = int(max(tiles.q1.max(), tiles.k1.max())) + shift
    hop = Hop(0, (0,), tiles, tokens, (), (), tokens, np.full(len(tiles), shift), (), ())
    return RankPlan(0, 1, tokens, (hop,))


def able(capabilities: Capabilities) -> AttentionKernel:
    """A kernel of these capabilities, which is never called."""
    return types.SimpleNamespace(capabilities=capabilities)


def run(plan: RankPlan, case: Case, capabilities: Capabilities, shift: int = 0) -> Grads:
    q, k, v, dout = (x.transpose(0, 1).double() for x in case)
    # The shard has more tokens than some tiles read: what no tile sees is NaN.
    padding = [
        x.new_full((plan.num_tokens - len(x), *x.shape[1:]), math.nan) for x in (q, k, v, dout)
    ]
    q, k, v, dout = (torch.cat([x, more]) for x, more in zip((q, k, v, dout), padding, strict=True))
    forward, backward = (
        work_of(plan, able(capabilities), q.device, backward=direction)
        for direction in (False, True)
    )
    merged = Merge(forward.queries, dout.shape, q, q.dtype)
    for hop in forward.hops:
        for call in forward.calls[hop]:
            merged.add(*call.attend(KERNEL, q, k, v, 0.25))
    out, lse = merged.finish()
    dqs, grads = (
        Sum(backward.queries, [q.shape], q, q.dtype),
        Sum(backward.keys[0], [k.shape, v.shape], k, k.dtype),
    )
    for hop in backward.hops:
        for call in backward.calls[hop]:
            dq, *key_grads = call.gradients(KERNEL, dout, q, k, v, out, Statistics(lse), 0.25)
            dqs.add(dq)
            grads.add(*key_grads)
    (dq,), (dk, dv) = dqs.finish(), grads.finish()
    assert not dk[:shift].any() and not dv[:shift].any()
    parts = (
        out[: case.q.shape[1]],
        dq[: case.q.shape[1]],
        *(x[shift : shift + case.k.shape[1]] for x in (dk, dv)),
    )
    return Grads(*(x.transpose(0, 1) for x in parts))


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
        got = run(alone(tiles, shift), seen, capabilities, shift)
        for name, x, y in zip(Grads._fields, got, truth, strict=True):
            y = y[:, : x.shape[1]]
            assert float((x - y).abs().max()) < 1e-12, (name, seed)


@pytest.mark.parametrize("reverse_order", [False, True])
def test_tiles_of_the_same_queries_are_one_sequence(reverse_order):
    """Rectangles over keys that lie apart in the buffer: one call, and the result of one tile."""
    tiles = [(0, 9, 20, 25), (9, 30, 3, 11), (0, 9, 11, 17), (9, 30, 30, 40), (0, 9, 0, 2)]
    tiles = tiles[::-1] if reverse_order else tiles
    plan = alone(Tiles.of([(*tile, -OPEN, OPEN) for tile in tiles]), 3)
    (call,) = kernel_calls(plan.hops[0], Capabilities(varlen=True))
    assert call.q.ends.tolist() == [0, 9, 30] and call.k.ends.tolist() == [0, 13, 31]
    case = Case.draw(40, h=4, g=2, d=8, e=12, dtype=torch.float64)
    allowed = paint(plan.hops[0].tiles, 40, 40) > 0
    got = run(plan, case, Capabilities(varlen=True), 3)
    for x, y in zip(got, brute_force(case, allowed, scale=0.25), strict=True):
        assert float((x - y).abs().max()) < 1e-12


def documents(count: int, size: int) -> list[int]:
    return np.cumsum([0, *np.random.default_rng(0).integers(3, 2 * size, count).tolist()]).tolist()


@pytest.mark.parametrize("window", [(-1, 0), (9, 0)])
@pytest.mark.parametrize("capabilities", CAPABILITIES, ids=str)
def test_packed_documents(capabilities, window):
    cu = documents(12, 16)
    plan = Plan.build(Mask.documents(cu, window=window), Layout.contiguous(cu[-1], 1))
    case = Case.draw(cu[-1], dtype=torch.float64)
    got = run(plan.rank_plan(0), case, capabilities)
    for x, y in zip(got, brute_force(case, plan.mask.dense(), scale=0.25), strict=True):
        assert error(x, y) < 1e-12


@pytest.mark.parametrize("window", [(-1, 0), (1, 0)])
def test_calls_do_not_grow_with_documents(window):
    """Side by side, they are one call on a slice of tokens: nothing is gathered."""
    for count in (8, 64):
        cu = documents(count, 16)
        hop = (
            Plan.build(Mask.documents(cu, window=window), Layout.contiguous(cu[-1], 1))
            .rank_plan(0)
            .hops[0]
        )
        (call,) = kernel_calls(hop, Capabilities(bands=True, varlen=True))
        assert isinstance(call, _Packed)
        assert call.q.tokens.index is call.k.tokens.index is None
        assert (call.left, call.right) == window
        assert len(kernel_calls(hop, Capabilities(bands=True))) == count


def test_work_is_made_once_and_dies_with_its_plan():
    import gc
    import weakref

    plan = alone(Tiles.of([Tile(0, 8, 0, 8)]))
    made = [
        work_of(plan, able(Capabilities()), torch.device("cpu"), backward)
        for backward in (False, True)
    ]
    assert made == [
        work_of(plan, able(Capabilities()), torch.device("cpu"), backward)
        for backward in (False, True)
    ]
    assert made[0] is not made[1]
    gone = weakref.ref(plan)
    del plan, made
    gc.collect()
    assert gone() is None
