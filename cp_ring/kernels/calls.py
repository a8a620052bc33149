"""The kernel calls of a hop. Its tiles are lowered to what a kernel can do, and small tiles are packed into one call.

`_make_calls` alone decides whether tiles go to a kernel one by one or packed.

Tensors have tokens first: q [s, b, h, d] is a rank's shard, k [u, b, g, d] and v [u, b, g, e] are a hop's key buffer. The
running out [s, b, h, e] and lse [b, h, s] are merged in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from cp_ring.kernels.base import OPEN, AttentionKernel, Capabilities, Packing, VarlenKernel
from cp_ring.ops.merge import merge_
from cp_ring.ops.sums import add_
from cp_ring.plan.lower import REVERSED, Lowered, lower
from cp_ring.plan.ranges import Ints
from cp_ring.plan.tables import Hop
from cp_ring.plan.tiles import Tile


class Statistics:
    """The lse [b, h, s] of all queries in backward. Consecutive calls with the same queries share one contiguous copy."""

    def __init__(self, lse: Tensor):
        self.whole = lse
        self._part: tuple[slice, Tensor] | None = None

    def of(self, queries: slice) -> Tensor:
        """The lse of these queries, [b, h, queries], contiguous."""
        if self._part is None or self._part[0] != queries:
            self._part = queries, self.whole[..., queries].contiguous()
        return self._part[1]


class KernelCall(Protocol):
    """One kernel call of a hop: a single tile, or many packed tiles.

    `attend` and `gradients` call the kernel. Their results have the call's own order of tokens. `merge_` and `add_` add them to
    the tensors of the rank.
    """

    def prepare(self, device: torch.device) -> None:
        """Copies the index tensors of the call to `device` once, before the first hop."""
        ...

    def attend(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Out and lse of the call's queries, from q of the shard and k, v of the key buffer."""
        ...

    def merge_(self, out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
        """Merges what `attend` returned into the running out [s, b, h, e] and lse [b, h, s]."""
        ...

    def gradients(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The call's share of dq, dk and dv, from the merged out and lse."""
        ...

    def add_(self, dq: Tensor, dk: Tensor, dv: Tensor, dq_part: Tensor, dk_part: Tensor, dv_part: Tensor) -> None:
        """Adds what `gradients` returned to dq [s, b, h, d] of the shard, and to dk and dv of the hop's gradient buffer."""
        ...


_made: weakref.WeakKeyDictionary[Hop, dict[Capabilities, tuple[KernelCall, ...]]] = weakref.WeakKeyDictionary()


def kernel_calls(hop: Hop, capabilities: Capabilities) -> tuple[KernelCall, ...]:
    """A hop's kernel calls. They are made once for each hop and live as long as the hop."""
    made = _made.setdefault(hop, {})
    if capabilities not in made:
        made[capabilities] = tuple(_make_calls(lower(hop.tiles, capabilities), hop.grad_shift, capabilities.varlen))
    return made[capabilities]


def prepare(hops: Sequence[Hop], capabilities: Capabilities, device: torch.device) -> None:
    """Makes the kernel calls of all hops and copies their index tensors to `device`, before the first hop."""
    for hop in hops:
        for call in kernel_calls(hop, capabilities):
            call.prepare(device)


def _make_calls(lowered: Lowered, grad_shift: Ints, varlen: bool) -> Iterator[KernelCall]:
    """A group of one tile is a single call, a group of several tiles a packed call.

    Only kernels with `capabilities.varlen` get packed calls.
    """
    tiles, reverse, shift = list(lowered.tiles), lowered.reverse.tolist(), grad_shift[lowered.parent].tolist()
    groups = _groups(tiles, lowered) if varlen else [[i] for i in range(len(tiles))]
    for group in groups:
        if len(group) == 1:
            yield _single(tiles[group[0]], shift[group[0]], reverse[group[0]])
        else:
            yield _packed([tiles[i] for i in group], [shift[i] for i in group], reverse[group[0]])


def _groups(tiles: list[Tile], lowered: Lowered) -> list[list[int]]:
    """Groups of tiles, by index, for one call each, in the order of their queries.

    Tiles of a group have the same `lowered.batch` and window, and share neither queries nor keys. So each token of dk and dv gets
    one addition, and the sum does not depend on the order.
    """
    groups: list[list[int]] = []
    last: dict[tuple[int, int, int], list[int]] = {}
    for index in np.lexsort((lowered.tiles.q0, lowered.batch)).tolist():
        tile = tiles[index]
        left, right = (0, 0) if lowered.kind[index] == REVERSED else _window(tile)
        open_groups = last.setdefault((int(lowered.batch[index]), left, right), [])
        for number in open_groups:
            if tiles[groups[number][-1]].k1 <= tile.k0:
                groups[number].append(index)
                break
        else:
            open_groups.append(len(groups))
            groups.append([index])
    return groups


def _window(tile: Tile) -> tuple[int, int]:
    """The tile's band as a window aligned bottom right, as flash-attn defines it; -1 for an open side."""
    corner = tile.k1 - tile.q1
    return -1 if tile.lo == -OPEN else corner - tile.lo, -1 if tile.hi == OPEN else tile.hi - corner


def _single(tile: Tile, shift: int, reverse: bool) -> _Single:
    slide = tile.k0 - tile.q0
    lo = tile.lo if tile.lo == -OPEN else tile.lo - slide
    hi = tile.hi if tile.hi == OPEN else tile.hi - slide
    if reverse:
        # In reverse order, key - query changes its sign. Only squares are reversed, so both corners give the same offset.
        lo, hi = -hi, -lo
    return _Single(
        slice(tile.q0, tile.q1), slice(tile.k0, tile.k1), slice(tile.k0 + shift, tile.k1 + shift), lo, hi, reverse
    )  # fmt: skip


@dataclass(frozen=True)
class _Single:
    """One tile: its queries in the shard, its keys in the key buffer and in the gradient buffer, and its band.

    `reverse` runs the tile with the order of queries and keys reversed, which turns an upper triangle into a causal one.
    """

    q: slice
    k: slice
    grad: slice
    lo: int
    hi: int
    reverse: bool

    def prepare(self, device: torch.device) -> None:
        return

    def attend(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (self._view(x, tokens) for x, tokens in ((q, self.q), (k, self.k), (v, self.k)))
        return kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=scale)

    def gradients(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out = (self._view(x, self.q) for x in (dout, q, out))
        k, v, lse_tile = self._view(k, self.k), self._view(v, self.k), lse.of(self.q)
        lse_tile = lse_tile.flip(2) if self.reverse else lse_tile
        return kernel.backward(dout, q, k, v, out, lse_tile, lo=self.lo, hi=self.hi, scale=scale)

    def merge_(self, out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
        if self.reverse:
            out_part, lse_part = out_part.flip(1), lse_part.flip(2)
        merge_(out[self.q].transpose(0, 1), lse[..., self.q], out_part, lse_part)

    def add_(self, dq: Tensor, dk: Tensor, dv: Tensor, dq_part: Tensor, dk_part: Tensor, dv_part: Tensor) -> None:
        parts = [(x.flip(1) if self.reverse else x).transpose(0, 1) for x in (dq_part, dk_part, dv_part)]
        add_(*zip((dq[self.q], dk[self.grad], dv[self.grad]), parts, strict=True))

    def _view(self, x: Tensor, tokens: slice) -> Tensor:
        """[s, b, ...] to the tile's [b, tokens, ...]."""
        x = x[tokens].transpose(0, 1)
        return x.flip(1) if self.reverse else x


def _packed(tiles: list[Tile], shift: list[int], reverse: bool) -> _Packed:
    spans = [(t.q0, t.q1) for t in tiles], [(t.k0, t.k1) for t in tiles]
    grads = [(t.k0 + s, t.k1 + s) for t, s in zip(tiles, shift, strict=True)]
    q, k, grad = (_Tokens.of(ranges, reverse) for ranges in (*spans, grads))
    left, right = (-1, 0) if reverse else _window(tiles[0])
    return _Packed(q, k, grad, left, right, _ends(spans[0]), _ends(spans[1]))


def _ends(spans: list[tuple[int, int]]) -> Ints:
    return np.cumsum([0, *(end - start for start, end in spans)])


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens of a buffer in the order of a packed call: a slice if the buffer has this order, else an index."""

    span: slice
    index: Ints | None
    _tensors: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spans: list[tuple[int, int]], reverse: bool) -> _Tokens:
        if not reverse and all(a[1] == b[0] for a, b in pairwise(spans)):
            return cls(slice(spans[0][0], spans[-1][1]), None)
        parts = [np.arange(start, end)[:: -1 if reverse else 1] for start, end in spans]
        return cls(slice(0, 0), np.concatenate(parts))

    def prepare(self, device: torch.device) -> None:
        if self.index is not None and device not in self._tensors:
            self._tensors[device] = _copied(self.index, device)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """The tokens of x: a view of a slice, or a copy by index."""
        if self.index is None:
            return x.narrow(dim, self.span.start, self.span.stop - self.span.start)
        return x.index_select(dim, self._on(x.device))

    def put_(self, x: Tensor, taken: Tensor, dim: int = 0) -> None:
        """Writes back what `take` copied."""
        if self.index is not None:
            x.index_copy_(dim, self._on(x.device), taken)

    def add_(self, x: Tensor, part: Tensor) -> None:
        """Adds to the indexed tokens of x. No token occurs twice, so the result does not depend on the order."""
        x.index_add_(0, self._on(x.device), part.to(x.dtype))

    def _on(self, device: torch.device) -> Tensor:
        self.prepare(device)
        return self._tensors[device]


@dataclass(frozen=True, eq=False)
class _Packed:
    """Many tiles with one window in one call. Batch rows become heads: [t, b, h, d] is one stream of b * h heads."""

    q: _Tokens
    k: _Tokens
    grad: _Tokens
    left: int
    right: int
    ends_q: Ints
    ends_k: Ints
    _packings: dict[torch.device, Packing] = field(default_factory=dict, repr=False)

    def prepare(self, device: torch.device) -> None:
        for tokens in (self.q, self.k, self.grad):
            tokens.prepare(device)
        if device not in self._packings:
            cu_q, cu_k = (_copied(ends.astype(np.int32), device) for ends in (self.ends_q, self.ends_k))
            max_q, max_k = (int(np.diff(ends).max()) for ends in (self.ends_q, self.ends_k))
            self._packings[device] = Packing(cu_q, cu_k, max_q, max_k, self.left, self.right)

    def attend(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (part.take(x).flatten(1, 2) for part, x in ((self.q, q), (self.k, k), (self.k, v)))
        return cast(VarlenKernel, kernel).forward_varlen(q, k, v, self._packing(q.device), scale)

    def gradients(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out = (self.q.take(x).flatten(1, 2) for x in (dout, q, out))
        k, v = (self.k.take(x).flatten(1, 2) for x in (k, v))
        lse_part = lse.of(self.q.span) if self.q.index is None else self.q.take(lse.whole, 2)
        packing = self._packing(q.device)
        return cast(VarlenKernel, kernel).backward_varlen(dout, q, k, v, out, lse_part.flatten(0, 1), packing, scale)

    def merge_(self, out: Tensor, lse: Tensor, out_part: Tensor, lse_part: Tensor) -> None:
        out_part = out_part.unflatten(1, out.shape[1:3]).transpose(0, 1)
        lse_part = lse_part.unflatten(0, lse.shape[:2])
        out_taken, lse_taken = self.q.take(out), self.q.take(lse, 2)
        merge_(out_taken.transpose(0, 1), lse_taken, out_part, lse_part)
        self.q.put_(out, out_taken)
        self.q.put_(lse, lse_taken, 2)

    def add_(self, dq: Tensor, dk: Tensor, dv: Tensor, dq_part: Tensor, dk_part: Tensor, dv_part: Tensor) -> None:
        pairs = []
        for total, tokens, x in ((dq, self.q, dq_part), (dk, self.grad, dk_part), (dv, self.grad, dv_part)):
            part = x.unflatten(1, total.shape[1:3])
            if tokens.index is None:
                pairs.append((total[tokens.span], part))
            else:
                tokens.add_(total, part)
        add_(*pairs)

    def _packing(self, device: torch.device) -> Packing:
        self.prepare(device)
        return self._packings[device]


def _copied(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on `device`. On CUDA the copy does not block the host."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
