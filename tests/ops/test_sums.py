"""Sums of gradients: torch operations here, the Triton source through Triton's interpreter in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_ring.ops.sums import add_, move_


def agrees_with_torch(add, move) -> None:
    """Three tensors of different rows, heads and sizes at once; targets are rows of larger buffers, sources strided."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 4):
        shapes = [(33, 2, 6, 20), (5, 2, 1, 40), (0, 2, 3, 8), (17, 1, 2, 1)][:count]
        stores = [torch.randn(rows + 4, *rest, generator=generator) for rows, *rest in shapes]
        sources = [torch.randn(b, h, rows, d + 3, generator=generator).bfloat16()[..., :d] for rows, b, h, d in shapes]
        sources = [x.permute(2, 0, 1, 3) for x in sources]
        before = [x.clone() for x in stores]
        add(*((store[2:-2], x) for store, x in zip(stores, sources, strict=True)))
        for store, old, x in zip(stores, before, sources, strict=True):
            assert torch.equal(store[2:-2], old[2:-2] + x.float())
            assert torch.equal(store[:2], old[:2]) and torch.equal(store[-2:], old[-2:]), "writes outside its rows"
        wires = [torch.full(shape, torch.nan, dtype=torch.float16) for shape in shapes]
        sums = [store[2:-2] for store in stores]
        wanted = [x.half() for x in sums]
        move(*zip(wires, sums, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(wires, wanted, strict=True))
        assert not any(x.any() for x in sums)


def test_torch_operations():
    agrees_with_torch(add_, move_)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_source_through_the_interpreter():
    program = (
        "import tests.ops.test_sums as t; from cp_ring.ops.sums_triton import sum_;"
        "t.agrees_with_torch(lambda *pairs: sum_(pairs, False), lambda *pairs: sum_(pairs, True))"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
