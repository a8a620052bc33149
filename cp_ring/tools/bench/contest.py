"""What a contestant of `cp-ring bench attention` gets (the sizes, `Contest`) and returns (a
function, `Round`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Round = Callable[[], Tensor]
"""One forward and backward; returns this rank's out [b, tokens, h, d]."""


@dataclass(frozen=True)
class Contest:
    """Sizes of the attention, which is causal with batch size 1.

    `n` tokens on `cp` ranks; `heads` heads of queries, of keys and of values, of size `head_dim`;
    `device` is cpu or cuda.
    """

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
        return [
            torch.randn(shape, generator=generator).to(self.device, getattr(torch, self.dtype))
            for _ in range(4)
        ]


def forward_and_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: list[Tensor]
) -> Round:
    """A round of `attend`, forward and backward, on `parts`: this rank's q, k, v and gradient of
    out.
    """
    q, k, v = (x.contiguous().requires_grad_() for x in parts[:3])

    def one_round() -> Tensor:
        out = attend(q, k, v)
        torch.autograd.grad(out, (q, k, v), parts[3])
        return out.detach()

    return one_round
