"""Gradients of multi-latent attention on two tensor-parallel ranks, which each have half of the
heads.
"""

from __future__ import annotations

import pytest
import torch

from tests.megatron.launch import attempt
from tests.parity.models import COMMON, LATENT, REFERENCE

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs the CPU runtime, which is inert where CUDA is present"
)


@pytest.mark.compat
def test_the_gradients_do_not_depend_on_the_tensor_parallel_size(tmp_path):
    flags = [
        *LATENT.split(),
        *REFERENCE.split(),
        "--num-layers",
        "2",
        "--seq-length",
        "64",
        "--train-iters",
        "2",
    ]
    one = attempt(1, "one", flags, tmp_path, COMMON)
    two = attempt(2, "two", [*flags, "--tensor-model-parallel-size", "2"], tmp_path, COMMON)
    assert one.code == two.code == 0, one.output + two.output
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
