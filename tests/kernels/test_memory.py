"""Nothing leaks, and every element is written, over many calls and shapes."""

from __future__ import annotations

import numpy as np

from cp_ring import Layout, Mask, Plan
from cp_ring.testing.oracle import Case, brute_force, error
from tests.conformance import _nan_memory
from tests.rings import attend


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
