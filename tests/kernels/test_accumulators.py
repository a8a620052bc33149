"""Bytes that merges and sums move: as the plan says, and much fewer than before partial results
were grouped.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import REGISTRY
from cp_ring.kernels.base import Capabilities
from cp_ring.ops import totals
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from tests.kernels import emulated_te
from tests.kernels.planned_updates import accumulator_bytes, rank_updates
from tests.loopback import LoopbackTransport

SIZES = AttentionSizes(heads=4, kv_heads=2, head_dim=16)
MASKS = {
    "causal": Mask.causal(1024),
    "window": Mask.causal(1024, window=(200, 0)),
    "documents": Mask.documents([0, 100, 130, 600, 1000], n=1024),
}


@pytest.fixture
def moved(monkeypatch) -> Counter[str]:
    """Bytes of the tensors that updates read and write, by what they update."""
    counts: Counter[str] = Counter()

    def counted(work, name):
        def run(segments, *tensors):
            *columns, running, result = (
                tensors if name == "add" else (tensors[0], tensors[2], tensors[4])
            )
            lses, lse = tensors[1::2][:2] if name == "merge" else ((), None)
            for segment in segments:
                for place in segment.places:
                    counts[name] += place.take(columns[0][place.part]).nbytes
                    counts[name] += place.take(lses[place.part], 2).nbytes if lses else 0
                stored = 0 if segment.first else 1
                counts[name] += running[segment.tokens].nbytes * stored if stored else 0
                counts[name] += segment.target(running, result).nbytes
                counts[name] += (
                    lse[..., segment.tokens].nbytes * (1 + stored) if lse is not None else 0
                )
            return work(segments, *tensors)

        return run

    for name in ("merge", "add"):
        monkeypatch.setattr(totals, name, counted(getattr(totals, name), name))
    monkeypatch.setitem(REGISTRY, "emulated", "tests.kernels.emulated_te")
    monkeypatch.setattr(emulated_te.CpuKernel, "capabilities", Capabilities(deterministic=True))
    with emulated_te.installed("2.20.2"):
        yield counts


@pytest.mark.parametrize("schedule", ["ring", "auto", "gather"])
@pytest.mark.parametrize("mask", MASKS)
def test_bytes_are_those_of_the_plan(moved, mask, schedule):
    plan = Plan.build(MASKS[mask], Layout.zigzag(1024, 4), schedule=schedule)
    for rank in range(4):
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn(256, 1, h, 16, generator=generator).bfloat16() for h in (4, 2, 2, 4)
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]
        moved.clear()
        out = ring_attention(
            q, k, v, LoopbackTransport(rank, 4), plan=plan, kernel="emulated", qkv_format="sbhd"
        )
        torch.autograd.grad(out, inputs, dout)
        # The running lse is float64 on the CPU.
        forward, backward = accumulator_bytes(
            rank_updates(plan.rank_plan(rank), Capabilities()), SIZES, lse_element=8
        )
        assert moved == {
            name: n for name, n in (("merge", forward), ("add", backward)) if n or name in moved
        }
