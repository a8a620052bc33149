"""What a kernel is: one tile in, (out, lse) out, and the tile's gradients from the merged out and lse.

A new kernel is one file with one object that follows `AttentionKernel`, and one line in `cp_ring.kernels.REGISTRY`.

Shapes: b batch, q query rows of the tile, k key columns of the tile, h query heads, g key/value heads (g divides h),
d head size of queries and keys, e head size of values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cp_ring.plan.lower import Capabilities
from cp_ring.plan.tiles import OPEN

__all__ = ["OPEN", "AttentionKernel", "Capabilities"]


class AttentionKernel(Protocol):
    """Attention of one tile. Tensors may be strided views; the last dimension is contiguous.

    `lo` and `hi` bound column - row within the tile (row and column 0 are the tile's corner): -OPEN and OPEN leave a side
    unbounded, hi = 0 alone is causal, aligned top left. A kernel only ever sees tiles that its `capabilities` allow.
    """

    name: str
    capabilities: Capabilities

    def refusal(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        """Why this kernel cannot run on such tensors, in one line; None when it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> tuple[Tensor, Tensor]:
        """q [b, q, h, d], k [b, k, g, d], v [b, k, g, e] to out [b, q, h, e] and lse [b, h, q] (natural log, float32 or 64).

        A row that sees nothing has out 0 and lse -inf.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of dq, dk, dv, from the out [b, q, h, e] and lse [b, h, q] of the whole row (all tiles merged)."""
        ...
