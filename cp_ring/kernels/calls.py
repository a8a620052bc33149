"""Kernel calls: what a hop gives to a kernel, and what it gets back. `cp_ring.kernels.packed` has
the calls of many tiles.

q [b, s, h, d] is a rank's shard, as kernels read it. k [u, b, g, d] and v [u, b, g, e] are a hop's
key buffer: any token range of them is contiguous and travels uncopied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cp_ring.kernels.base import OPEN, AttentionKernel, Gradients, OutLse
from cp_ring.kernels.queries import Queries
from cp_ring.plan.records import Pairs
from cp_ring.plan.tiles import Tile
from cp_ring.plan.updates import Partial


class KernelCall(Protocol):
    """One kernel call of a hop: a single tile, or many packed tiles.

    Results have the call's own order of tokens. `queries` says to which tokens of out and dq they
    belong, and `keys` to which tokens of the hop's gradient buffer.
    """

    @property
    def queries(self) -> Partial: ...

    @property
    def keys(self) -> Partial: ...

    def pairs(self) -> Pairs:
        """Return the pairs that the call computes, for the proof."""
        ...

    def prepare(self, device: torch.device) -> None:
        """Copy the index tensors of the call to `device` once, before the first hop."""
        ...

    def attend(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> OutLse:
        """Return out [b, t, h, e] and lse [b, h, t] of the call's queries, from q of the shard and
        k, v of the key buffer.
        """
        ...

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> Gradients:
        """Return the call's share of dq [b, t, h, d], dk [u, b, g, d] and dv [u, b, g, e]."""
        ...


@dataclass(frozen=True, eq=False)
class SingleCall:
    """One tile: its queries in the shard, its keys in the key buffer, and its band.

    `reverse` runs the tile with the order of queries and keys reversed, which turns an upper
    triangle into a causal one.
    """

    q: slice
    k: slice
    lo: int
    hi: int
    reverse: bool

    queries: Partial
    keys: Partial

    @classmethod
    def of(cls, tile: Tile, shift: int, reverse: bool) -> SingleCall:
        """Make the call of a tile. `shift` is from its keys to their gradients."""
        slide = tile.k0 - tile.q0
        lo = tile.lo if tile.lo == -OPEN else tile.lo - slide
        hi = tile.hi if tile.hi == OPEN else tile.hi - slide
        if reverse:
            # In reverse order, key - query changes its sign. Only squares are reversed, so both
            # corners give the same offset.
            lo, hi = -hi, -lo
        queries = Partial.of([(tile.q0, tile.q1)], reverse=reverse)
        keys = Partial.of([(tile.k0 + shift, tile.k1 + shift)], reverse=reverse)
        return cls(slice(tile.q0, tile.q1), slice(tile.k0, tile.k1), lo, hi, reverse, queries, keys)

    def pairs(self) -> Pairs:
        step = -1 if self.reverse else 1
        queries, keys = (np.arange(x.start, x.stop)[::step] for x in (self.q, self.k))
        of_q, of_k = (np.array([0, len(x)]) for x in (queries, keys))
        return Pairs(queries, keys, of_q, of_k, np.array([self.lo]), np.array([self.hi]))

    def prepare(self, device: torch.device) -> None:
        return

    def attend(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> OutLse:
        (q,), (k, v) = queries.part(self.q), self._keys(k, v)
        if self.reverse:
            q = q.flip(1)
        return kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=scale)

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> Gradients:
        dout, q, out, lse = queries.part(self.q)
        if self.reverse:
            dout, q, out, lse = dout.flip(1), q.flip(1), out.flip(1), lse.flip(2)
        k, v = self._keys(k, v)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, lo=self.lo, hi=self.hi, scale=scale)
        return dq, dk.transpose(0, 1), dv.transpose(0, 1)

    def _keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """View the tile's keys and values as [b, keys, ...]."""
        if self.k.stop - self.k.start < k.shape[0]:
            k, v = k[self.k], v[self.k]
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        return (k.flip(1), v.flip(1)) if self.reverse else (k, v)
