"""What a kernel is: one tile in, (out, lse) out, and the tile's gradients from the merged out and lse.

A new kernel is one file with one object that follows `AttentionKernel` (and `VarlenKernel` where its capabilities say
varlen), one line in `cp_ring.kernels.REGISTRY`, and one line in its tests: `conformance.check(kernel, device, dtype)`.

Shapes: b batch, q query rows of the tile, k key columns of the tile, h query heads, g key/value heads (g divides h),
d head size of queries and keys, e head size of values, t and u packed query and key rows of many tiles.

Determinism is asked for by `ring_attention(deterministic=True)`, or by torch's own switch,
`torch.use_deterministic_algorithms(True)` (`warn_only` changes nothing, as in torch): then a kernel whose
`capabilities.deterministic` is true gives the same bits in every run, and the others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cp_ring.plan.lower import Capabilities
from cp_ring.plan.tiles import OPEN

__all__ = [
    "OPEN",
    "AttentionKernel",
    "Capabilities",
    "Packing",
    "VarlenKernel",
    "determinism",
    "deterministic",
    "no_random_state",
]

_asked: ContextVar[bool | None] = ContextVar("deterministic", default=None)


@contextmanager
def determinism(asked: bool | None) -> Iterator[bool]:
    """What `deterministic` says in the block, which it yields too; None leaves it to torch's switch."""
    token = _asked.set(asked)
    try:
        yield deterministic()
    finally:
        _asked.reset(token)


def deterministic() -> bool:
    """Whether kernels must give the same bits in every run."""
    asked = _asked.get()
    if asked is not None:
        return asked
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@lru_cache(maxsize=64)
def no_random_state(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What operators want as the random state of dropout, which is off: nothing reads it. int64 zeros, made once."""
    return torch.zeros(shape, dtype=torch.int64, device=device)


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


@dataclass(frozen=True)
class Packing:
    """Many tiles in one call: tile i has query rows cu_q[i] to cu_q[i + 1] and key rows cu_k[i] to cu_k[i + 1], none empty.

    cu_q, cu_k int32 [tiles + 1] on the tensors' device; max_q, max_k the largest tile's rows and columns.
    left, right: the window, aligned bottom right, the same for all tiles: row i of q sees column j of k where
    -left <= (j - k) - (i - q) <= right; -1 leaves a side unbounded. Without `capabilities.bands` it is (-1, -1), or (-1, 0)
    on tiles that are all square. Each row sees a key.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    left: int = -1
    right: int = -1


@runtime_checkable
class VarlenKernel(Protocol):
    """What a kernel whose `capabilities.varlen` is true has besides."""

    def forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        """q [t, h, d], k [u, g, d], v [u, g, e] to out [t, h, e] and lse [h, t] (natural log)."""
        ...

    def backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tiles' shares of dq, dk, dv, from the merged out [t, h, e] and lse [h, t] of the whole rows."""
        ...
