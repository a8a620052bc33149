"""The merge against float64, and the choice of a kernel. tests/testing has the kernels on tiles."""

from __future__ import annotations

import math

import pytest
import torch

from cp_ring.errors import KernelError
from cp_ring.kernels import REGISTRY, choose, merge_
from cp_ring.megatron.options import choices
from cp_ring.testing.oracle import error

CPU = torch.device("cpu")


def kernel(name, dtype=torch.float32):
    return choose(name, device=CPU, dtype=dtype, d=16, e=16)


def test_merge_equals_float64():
    torch.manual_seed(0)
    outs, lses = (
        torch.randn(6, 2, 9, 3, 4, dtype=torch.float64),
        20 * torch.randn(6, 2, 3, 9, dtype=torch.float64),
    )
    lses[:, 0, 0, 0] = -math.inf  # seen by no tile
    lses[1:, 0, 0, 1] = -math.inf  # by the first alone
    lses[:-1, 0, 0, 2] = -math.inf  # by the last alone
    outs = outs.where(lses.transpose(2, 3)[..., None] > -math.inf, 0.0)
    truth_lse = lses.logsumexp(0)
    weights = torch.where(lses == -math.inf, 0.0, (lses - truth_lse).exp()).transpose(2, 3)[
        ..., None
    ]
    truth = (outs * weights).sum(0)
    out, lse = torch.zeros(2, 9, 3, 4), torch.full((2, 3, 9), -math.inf)
    for out_tile, lse_tile in zip(outs.float(), lses.float(), strict=True):
        merge_(out, lse, out_tile, lse_tile)
    assert error(out, truth) < 5e-7
    assert torch.equal(lse.isneginf(), truth_lse.isneginf())
    seen = ~truth_lse.isneginf()
    assert error(lse[seen], truth_lse[seen]) < 1e-7
    assert (out[0, 0, 0] == 0).all()


def test_auto_takes_the_fastest_that_can():
    assert kernel("auto").name == "cpu"
    assert choose("auto", device=CPU, dtype=torch.float16, d=8, e=8).name == "cpu"


def test_explicit_choice_is_never_replaced():
    with pytest.raises(
        KernelError, match=r"kernel='cpu': cpu runs on the CPU, the tensors are on cuda"
    ):
        choose("cpu", device=torch.device("cuda"), dtype=torch.float32, d=8, e=8)
    with pytest.raises(
        KernelError,
        match=r"kernel='auto': .*cpu does not know torch.int64; reference reads floating",
    ):
        choose("auto", device=CPU, dtype=torch.int64, d=8, e=8)


def test_flag_lists_the_registry():
    assert choices("kernel") == ("auto", *REGISTRY)


def test_choice_is_said_once(caplog):
    with caplog.at_level("INFO", logger="cp_ring.kernels"):
        for _ in range(3):
            choose("auto", device=CPU, dtype=torch.float32, d=13, e=11)
    assert [record.message for record in caplog.records] == [
        "attention kernel: cpu (auto; on cpu, torch.float32, head sizes 13 and 11)"
    ]
