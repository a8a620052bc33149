"""The merge against float64: torch operations here, the Triton source through Triton's interpreter
in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from cp_ring.ops.merge import merge, merge_
from tests.ops.cases import merges_agree_with_float64
from tests.ops.interpreted import interpreted


def test_torch_merge():
    merges_agree_with_float64(merge, exact=False)


def test_one_tile_in_float64():
    out, lse = (
        torch.zeros(1, 2, 1, 2, dtype=torch.float64),
        torch.full((1, 1, 2), -math.inf, dtype=torch.float64),
    )
    merge_(out, lse, torch.ones(1, 2, 1, 2), torch.tensor([[[0.5, -math.inf]]]))
    assert out.tolist() == [[[[1.0, 1.0]], [[0.0, 0.0]]]]
    assert lse.tolist() == [[[0.5, -math.inf]]]


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_source_through_the_interpreter():
    interpreted(
        "from cp_ring.ops.merge_triton import merge; from tests.ops.cases import "
        "merges_agree_with_float64 as check;check(lambda segments, *tensors: "
        "merge(segments.blocks(torch.device('cpu')), *tensors))"
    )
