"""Merges and sums of gradients: torch operations here, the Triton source through Triton's interpreter
in a process of its own.
"""

import importlib.util

import pytest

from cp_ring.ops.merge import merge
from cp_ring.ops.sums import add
from tests.ops.cases import merges_agree_with_float64, sums_agree_with_float64
from tests.ops.interpreted import interpreted


def test_torch_operations():
    merges_agree_with_float64(merge, exact=False)
    sums_agree_with_float64(add)


@pytest.mark.ci
@pytest.mark.parametrize(
    "function, check",
    [
        ("merge_triton.merge", "merges_agree_with_float64"),
        ("sums_triton.add", "sums_agree_with_float64"),
    ],
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_source_through_the_interpreter(function, check):
    module = function.partition(".")[0]
    interpreted(
        f"import tests.ops.cases as cases; from cp_ring.ops import {module};"
        f"cases.SHAPES = cases.SHAPES[:2]; cases.MOSTS = cases.MOSTS[1:]; cases.{check}({function})"
    )
