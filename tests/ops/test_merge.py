"""The merge against float64: torch operations here, the Triton source through Triton's interpreter in a process of its own."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_ring.ops.merge import merge_
from cp_ring.testing.oracle import error


def agrees_with_float64(merge) -> None:
    """Strided running tensors; tiles of bfloat16 and float32; rows seen by no tile, the first, the last."""
    generator = torch.Generator().manual_seed(0)
    for b, s, h, e, dtype in ((2, 19, 3, 24, torch.float32), (1, 33, 2, 40, torch.bfloat16), (3, 1, 1, 1, torch.float32)):
        outs = torch.randn(5, b, s, h, e, generator=generator, dtype=torch.float64).to(dtype)
        lses = (20 * torch.randn(5, b, h, s, generator=generator, dtype=torch.float64)).float()
        lses[:, 0, 0, 0] = -math.inf
        if s > 2:
            lses[1:, 0, 0, 1], lses[:-1, 0, 0, 2] = -math.inf, -math.inf
        truth_lse = lses.double().logsumexp(0)
        weights = torch.where(lses == -math.inf, 0.0, (lses.double() - truth_lse).exp()).transpose(2, 3)[..., None]
        truth = (outs.double() * weights).sum(0)
        store, lse_store = torch.full((s + 6, b, h, e), 7.0), torch.full((b, h, s + 6), 7.0)
        out, lse = store[3 : 3 + s].zero_().transpose(0, 1), lse_store[..., 3 : 3 + s].fill_(-math.inf)
        for out_tile, lse_tile in zip(outs, lses, strict=True):
            tile = torch.empty(s, b, h, e + 3, dtype=dtype)[..., :e].transpose(0, 1).copy_(out_tile)
            merge(out, lse, tile, lse_tile.transpose(1, 2).contiguous().transpose(1, 2))
        seen = ~truth_lse.isneginf()
        assert torch.equal(lse.isneginf(), ~seen)
        assert not out.transpose(1, 2)[~seen].any()
        if seen.any():
            assert error(out, truth) < 1e-6
            assert error(lse[seen], truth_lse[seen]) < 1e-6
        around = torch.cat([store[:3], store[3 + s :]]).unique().tolist() + lse_store[..., :3].unique().tolist()
        assert set(around) == {7.0}, "writes outside its rows"


def test_torch_merge():
    agrees_with_float64(merge_)


def test_torch_merge_in_float64():
    out, lse = torch.zeros(1, 2, 1, 2, dtype=torch.float64), torch.full((1, 1, 2), -math.inf, dtype=torch.float64)
    merge_(out, lse, torch.ones(1, 2, 1, 2), torch.tensor([[[0.5, -math.inf]]]))
    assert out.tolist() == [[[[1.0, 1.0]], [[0.0, 0.0]]]]
    assert lse.tolist() == [[[0.5, -math.inf]]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_source_through_the_interpreter():
    program = "import tests.ops.test_merge as t; from cp_ring.ops.merge_triton import merge_; t.agrees_with_float64(merge_)"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
