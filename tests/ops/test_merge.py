"""The merge against float64: torch operations here, the Triton source through Triton's interpreter
in a process of its own.
"""

from __future__ import annotations

import importlib.util

import pytest

from cp_ring.ops.merge import merge
from tests.ops.cases import merges_agree_with_float64
from tests.ops.interpreted import interpreted


def test_torch_merge():
    merges_agree_with_float64(merge, exact=False)


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_source_through_the_interpreter():
    interpreted(
        "from cp_ring.ops.merge_triton import merge; from tests.ops.cases import "
        "merges_agree_with_float64 as check;check(lambda segments, *tensors: "
        "merge(segments.blocks(torch.device('cpu')), *tensors))"
    )
