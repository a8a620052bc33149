"""The interface of a kernel: it computes (out, lse) of one tile, and the tile's gradients from the
merged out and lse.

To add a kernel:
1. Write a module with an object `KERNEL` that follows `AttentionKernel`, and `VarlenKernel` if its
   `capabilities.varlen` is true. `capabilities` lists the kernel's abilities beyond full and causal
   tiles; the plan's tiles are lowered to these.
2. Add its name and module to `cp_ring.kernels.REGISTRY` (whose docstring shows how another package
   does it). The flag `--cp-ring-kernel`, the YAML key, `ring_attention(kernel=...)` and the help
   text take the names from there.
3. Test it: `tests.conformance.check(kernel, device, dtype)` checks every property that the ring
   relies on.

Shapes: b batch, q queries of the tile, k keys of the tile, h query heads, g key/value heads (g
divides h), d head size of queries and keys, e head size of values, t and u packed queries and keys
of many tiles.

`ring_attention(deterministic=True)` and torch's switch, `torch.use_deterministic_algorithms(True)`,
ask for determinism (`warn_only` does not, as in torch). Then kernels whose
`capabilities.deterministic` is true give the same bits in every run, and other kernels are
rejected.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_ring.plan.lower import Capabilities
from cp_ring.plan.tiles import OPEN, Tiles
from cp_ring.runtime import RUNTIME

__all__ = [
    "OPEN",
    "AttentionKernel",
    "Capabilities",
    "CountingKernel",
    "Gradients",
    "LimitedVarlen",
    "MaxLogitKernel",
    "OutLse",
    "Packing",
    "Room",
    "SizedVarlen",
    "Sizes",
    "VarlenKernel",
    "determinism",
    "deterministic",
    "no_random_state",
    "switched",
]

OutLse = tuple[Tensor, Tensor]
"""out and lse of a kernel call."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv of a kernel call."""

_asked: ContextVar[bool | None] = ContextVar("deterministic", default=None)


class determinism:
    """A context that sets the value of `deterministic()` in its block.

        with determinism(True):
            out = ring_attention(q, k, v)

    The value None follows torch's switch.
    """

    def __init__(self, asked: bool | None):
        self._value = asked

    def __enter__(self) -> None:
        self._token = _asked.set(self._value)

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._token)


def deterministic() -> bool:
    """Return True if kernels must give the same bits in every run."""
    asked = _asked.get()
    return switched() if asked is None else asked


def switched() -> bool:
    """Return True if torch's switch, which is that of the whole process, asks for the same bits.
    `warn_only` does not.
    """
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@RUNTIME.cache(maxsize=64)
def no_random_state(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a random state for operators that want one although dropout is off: zeros, made
    once.
    """
    return torch.zeros(shape, dtype=torch.int64, device=device)


class AttentionKernel(Protocol):
    """Attention of one tile. Tensors may be strided views; the last dimension is contiguous.

    `lo` and `hi` bound key - query, both counted within the tile. -OPEN and OPEN leave a side
    unbounded; lo = -OPEN with hi = 0 is causal, aligned top left, of as many keys as queries or
    fewer. A kernel gets only tiles that its `capabilities` allow.
    """

    name: str
    capabilities: Capabilities

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        """Return in one line why the kernel does not support such tensors; None if it does."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        """Compute out [b, q, h, e] and lse [b, h, q] (natural log, float32 or 64) from q [b, q, h,
        d], k [b, k, g, d] and v [b, k, g, e].

        A query that sees no key has out 0 and lse -inf.
        """
        ...

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
    ) -> Gradients:
        """Return the tile's share of dq, dk, dv, with the shapes of q, k, v, from dout [b, q, h,
        e], and the merged out [b, q, h, e] and lse [b, h, q] of all tiles of its queries. `lo` and
        `hi` are those of forward.
        """
        ...


@runtime_checkable
class MaxLogitKernel(Protocol):
    """The extra methods of kernels that know the largest logit of each head."""

    def max_logit_rejection(self) -> str | None:
        """Say why the libraries of this machine do not give the largest logits; None if they do."""
        ...

    def with_max_logit(self) -> CountingKernel:
        """Return a kernel for one call that keeps its largest logits."""
        ...


class CountingKernel(AttentionKernel, Protocol):
    """A kernel that keeps the largest logit of each query head in its tiles, float32 [h]: over the
    pairs that the tiles allow, times the scale. It is None before the first tile.
    """

    max_logit: Tensor | None


@dataclass(frozen=True)
class Packing:
    """Many tiles in one call: tile i has queries cu_q[i] to cu_q[i + 1] and keys cu_k[i] to cu_k[i
    + 1]; no tile is empty.

    For a `SizedVarlen` the last tiles may be empty, and tensors may have tokens after those of the
    last tile. Their results are not read. max_q and max_k may then exceed the largest tile.

    cu_q, cu_k: int32 [tiles + 1] on the tensors' device. max_q, max_k: queries and keys of the
    largest tile.
    left, right: the window, aligned bottom right, the same for all tiles: in a tile of q queries
    and k keys, query i sees key j
    where -left <= (j - k) - (i - q) <= right; -1 leaves a side unbounded. Without
    `capabilities.bands` it is (-1, -1), or (-1, 0) on tiles that are all square. Each query sees at
    least one key.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    left: int = -1
    right: int = -1


@runtime_checkable
class LimitedVarlen(Protocol):
    """The extra method of kernels that support packed tiles only for some tensors."""

    def varlen_rejection(self, dtype: torch.dtype, d: int, e: int) -> str | None:
        """Return in one line why the kernel does not support packed tiles of tensors that it
        supports one by one; None if it does.
        """
        ...


class Room(NamedTuple):
    """The least sizes of one side of a packed call: its tokens, those that its longest sequence is
    said to have, and its sequences.
    """

    tokens: int = 0
    longest: int = 0
    sequences: int = 0


class Sizes(Protocol):
    """The sizes of a rank's packed calls. Equal objects give equal sizes."""

    def packs(self, tiles: Tiles) -> NDArray[np.bool_]:
        """Return the tiles that are packed even if they are alone in their call, bool [tiles]."""
        ...

    def rooms(self, queries: int, keys: int, sequences: int) -> tuple[Room, Room]:
        """Return to what the queries and the keys of a call are filled up."""
        ...


@runtime_checkable
class SizedVarlen(Protocol):
    """The extra method of kernels for which packed calls of a new size are slow at first: their
    calls are filled up to a few sizes.
    """

    def call_sizes(self, shard: int, packed: bool) -> Sizes:
        """Return the sizes for a rank with `shard` tokens; `packed` as for `choose`."""
        ...


@runtime_checkable
class VarlenKernel(Protocol):
    """The extra methods of kernels whose `capabilities.varlen` is true."""

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> OutLse:
        """Compute out [t, h, e] and lse [h, t] (natural log) from q [t, h, d], k [u, g, d] and v
        [u, g, e].
        """
        ...

    def backward_varlen(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packing: Packing,
        scale: float,
    ) -> Gradients:
        """Return the tiles' shares of dq, dk, dv, from the merged out [t, h, e] and lse [h, t] of
        their queries.
        """
        ...
