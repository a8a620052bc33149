"""What ranks run on the fake GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import cp_ring
from tests.fakegpu.accesses import mark, recorded


def ring(steps: int = 3, tokens: int = 256, **options: Any) -> None:
    """`ring_attention`, forward and backward, several times; each is a part of the log."""
    group = dist.group.WORLD if dist.is_initialized() else None
    h, g, d, e = options.pop("sizes", (4, 2, 64, 64))
    with recorded():
        for step in range(steps):
            mark(f"step {step}")
            shapes = (h, d), (g, d), (g, e)
            q, k, v = (
                torch.empty(1, tokens, *shape, device="cuda", dtype=torch.bfloat16)
                for shape in shapes
            )
            for x in (q, k, v):
                x.requires_grad_()
            out = cp_ring.ring_attention(q, k, v, group, **options)
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    mark("end")
