"""Nothing leaks, and every element is written, over many calls and shapes."""

from __future__ import annotations

import gc
import math

import numpy as np
import psutil
import torch

from cp_ring.kernels.base import OPEN, Capabilities
from cp_ring.kernels.conformance import _nan_memory
from cp_ring.kernels.cpu import KERNEL
from cp_ring.kernels.merge import merge_
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.steps import Statistics, program
from cp_ring.plan import Mask
from cp_ring.plan.rows import Hop


def step(q, k, v, dout, out, lse) -> None:
    options = {"lo": -OPEN, "hi": 0, "scale": 0.3}
    merge_(out, lse, *KERNEL.forward(q, k, v, **options))
    KERNEL.backward(dout, q, k, v, out, lse, **options)


def test_ten_thousand_calls_leak_nothing():
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 16, 2, 8) for _ in range(4))
    out, lse = torch.zeros_like(q), torch.full((1, 2, 16), -math.inf)
    process = psutil.Process()
    for _ in range(2000):
        step(q, k, v, dout, out, lse)
    gc.collect()
    before = process.memory_info().rss
    for _ in range(10_000):
        step(q, k, v, dout, out, lse)
    gc.collect()
    assert process.memory_info().rss <= 1.01 * before


def test_a_hundred_shapes_with_nan_in_fresh_memory():
    """Random documents, windows, heads and sizes: a whole shard's steps leave no element unwritten, nor read one."""
    generator = np.random.default_rng(0)
    for index in range(100):
        n, groups, b = int(generator.integers(1, 60)), int(generator.integers(1, 4)), int(generator.integers(1, 3))
        h, d, e = groups * int(generator.integers(1, 4)), int(generator.integers(1, 20)), int(generator.integers(1, 20))
        cuts = np.unique([0, n, *generator.integers(0, n + 1, 3).tolist()]).tolist()
        mask = Mask.documents(cuts, window=(int(generator.integers(-1, 12)), 0))
        hop = Hop(0, 0, mask.pieces, n, None, (), n, np.zeros(len(mask.pieces), np.int64), (), ())
        kernel, capabilities = [(KERNEL, Capabilities()), (REFERENCE, REFERENCE.capabilities)][index % 2]
        q, k, v, dout = (torch.randn(n, b, *x) for x in ((h, d), (groups, d), (groups, e), (h, e)))
        with _nan_memory():
            out, lse = torch.zeros_like(dout), torch.full((b, h, n), -math.inf)
            dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
            steps = program(hop, capabilities)
            for one in steps:
                one.forward_(kernel, q, k, v, out, lse, d**-0.5)
            for one in steps:
                one.backward_(kernel, dout, q, k, v, out, Statistics(lse), dq, dk, dv, d**-0.5)
        assert all(x.isfinite().all() for x in (out, lse, dq, dk, dv)), (index, n, cuts)
