"""The largest attention logit of each head: what --qk-clip and --log-max-attention-logit of
Megatron need.

Kernels return no logits, so they are computed a second time, in blocks: half as many operations as
a forward pass more.

Shapes: b batch rows, q queries, k keys, h query and g key/value heads, d head size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cp_ring.kernels.base import AttentionKernel

_BLOCK = 1 << 21  # logits that are held at a time


class LogitKernel:
    """Follows `AttentionKernel`, computes what `kernel` does, and keeps the largest logit of each
    head that it saw.

    `largest` is float32 [h], None before the first call: the largest q . k * scale of the visible
    pairs of this rank's tiles. The last `columns` of queries and keys are no part of the head (see
    `cp_ring.kernels.dropout`).
    """

    def __init__(self, kernel: AttentionKernel, columns: int = 0):
        self._kernel, self._columns = kernel, columns
        self.name, self.capabilities = (
            kernel.name,
            replace(kernel.capabilities, varlen=False, concurrent=False),
        )
        self.largest: Tensor | None = None

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        return self._kernel.rejection(device, dtype, d, e)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionKernel.forward`."""
        self._see(q, k, lo, hi, scale)
        return self._kernel.forward(q, k, v, lo=lo, hi=hi, scale=scale)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        lo: int,
        hi: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionKernel.backward`."""
        return self._kernel.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)

    def anew(self) -> LogitKernel:
        """The same kernel before its first call, for calls that have a part of the heads; `add`
        takes what it has found.
        """
        return LogitKernel(self._kernel, self._columns)

    def add(self, part: LogitKernel, first: int, heads: int) -> None:
        """Adds the largest logits of `part`, whose heads are those from `first` on of `heads`;
        others begin with -inf.
        """
        if part.largest is None:
            return
        if self.largest is None:
            self.largest = part.largest.new_full((heads,), -math.inf)
        own = self.largest[first : first + len(part.largest)]
        torch.maximum(own, part.largest, out=own)

    def _see(self, q: Tensor, k: Tensor, lo: int, hi: int, scale: float) -> None:
        d, heads, keys = q.shape[3] - self._columns, q.shape[2], k.shape[1]
        # Heads that share a key/value head are more queries of it: [b, g, q, h / g, d].
        q_heads = q[..., :d].unflatten(2, (k.shape[2], -1)).transpose(1, 2).float()
        k_heads = k[..., :d].permute(0, 2, 3, 1).float()  # [b, g, d, k]
        size = max(1, _BLOCK // (q.shape[0] * heads * keys))
        for start in range(0, q.shape[1], size):
            block = q_heads[:, :, start : start + size]
            # One product for each key/value head: a product for each query would read a copy of the
            # keys each. [b, g, q, h / g, k]
            logits = (block.flatten(2, 3) @ k_heads).unflatten(2, block.shape[2:4]) * scale
            queries = torch.arange(start, start + logits.shape[2], device=q.device)
            offset = torch.arange(keys, device=q.device) - queries[:, None]
            hidden = (offset < lo) | (offset > hi)
            found = logits.masked_fill(hidden[:, None], -math.inf).amax((0, 2, 4)).flatten()
            self.largest = found if self.largest is None else torch.maximum(self.largest, found)
