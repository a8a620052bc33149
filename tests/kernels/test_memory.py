"""Nothing leaks, and every element is written, over many calls and shapes."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.testing.oracle import Case, brute_force, error
from tests.conformance import _nan_memory
from tests.loopback import LoopbackTransport
from tests.rings import attend


@pytest.mark.ci
def test_calls_leak_nothing():
    """Forward and backward of a rank among four, with their messages, buffers and autograd; some
    calls have no backward.
    """
    plan = Plan.build(Mask.documents([0, 7, 64]), Layout.zigzag(64, 4))
    transport = LoopbackTransport(1, 4)
    q, k, v, dout = (plan.layout.shard(x, 1, 1) for x in Case.draw(64, h=2, g=1, d=8))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    process = psutil.Process()

    def many(count):
        for i in range(count):
            out = ring_attention(q, k, v, transport, plan=plan)
            if i % 8:
                torch.autograd.grad(out, inputs, dout)
        gc.collect()
        return process.memory_info().rss

    before = many(500)
    assert many(1000) <= 1.01 * before


def test_a_hundred_shapes_with_nan_in_fresh_memory():
    """Random ranks, documents, windows, heads and sizes: a whole ring leaves no element unwritten,
    nor reads such a one.
    """
    generator = np.random.default_rng(0)
    for index in range(100):
        cp, groups, b = (int(generator.integers(1, high)) for high in (5, 4, 3))
        n = int(generator.integers(2 * cp, 60))
        h, d, e = (
            groups * int(generator.integers(1, 4)),
            int(generator.integers(1, 20)),
            int(generator.integers(1, 20)),
        )
        cuts = np.unique([0, *generator.integers(0, n + 1, 3).tolist()]).tolist()
        mask = Mask.documents(cuts, window=(int(generator.integers(-1, 12)), 0), n=n)
        plan = Plan.build(mask, Layout.zigzag(n, cp), ("direct", "ring")[index // 2 % 2])
        case = Case.draw(n, b=b, h=h, g=groups, d=d, e=e, seed=index)
        truth = brute_force(case, mask.dense())
        with _nan_memory():
            results = attend(case, plan, kernel=("cpu", "reference")[index % 2])
        for result, wanted in zip(results, truth, strict=True):
            assert result.isfinite().all(), (index, n, cp, cuts)
            assert error(result, wanted) < 1e-5 or not wanted.any(), (index, n, cp, cuts)
