"""What `cp-ring bench attention` asks of a contestant: sizes go in, a function that runs one round comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Round = Callable[[], Tensor]
"""One forward and backward; returns this rank's out [b, tokens, h, d]."""


@dataclass(frozen=True)
class Contest:
    """Sizes of the attention: causal, batch 1, `heads` query and key/value heads of `head_dim`; `device` is cpu or cuda."""

    n: int
    cp: int
    heads: int
    head_dim: int
    dtype: str = "float32"
    device: str = "cpu"

    def draw(self) -> list[Tensor]:
        """q, k, v, dout of the whole sequence, [1, n, heads, head_dim], the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.n, self.heads, self.head_dim)
        return [torch.randn(shape, generator=generator).to(self.device, getattr(torch, self.dtype)) for _ in range(4)]


def differentiated(attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: list[Tensor]) -> Round:
    """A round of `attend` on this rank's q, k, v and gradient of out."""
    q, k, v = (x.contiguous().requires_grad_() for x in parts[:3])

    def one_round() -> Tensor:
        out = attend(q, k, v)
        torch.autograd.grad(out, (q, k, v), parts[3])
        return out.detach()

    return one_round
