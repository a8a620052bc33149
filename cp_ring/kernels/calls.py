"""The kernel calls of a hop: its tiles lowered to what a kernel can do, many small ones in one call where it can.

Tensors are tokens first: q [s, b, h, d] rows of a rank's shard, k [u, b, g, d] and v [u, b, g, e] rows of a hop's key
buffer; out [s, b, h, e] and lse [b, h, s] are the running ones, merged in place.
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
    """The lse [b, h, s] of all rows in backward. A part is copied once for the hops that follow with the same rows."""

    def __init__(self, lse: Tensor):
        self.whole = lse
        self._part: tuple[slice, Tensor] | None = None

    def of(self, rows: slice) -> Tensor:
        """[b, h, rows], contiguous."""
        if self._part is None or self._part[0] != rows:
            self._part = rows, self.whole[..., rows].contiguous()
        return self._part[1]


class Step(Protocol):
    """One kernel call of a hop. `attend` and `gradients` are the bare call, in the step's own order of rows and shapes."""

    def place(self, device: torch.device) -> None:
        """Makes the tensors that the step's calls need on `device`, so that the hops themselves make none."""
        ...

    def attend(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]: ...

    def gradients(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward_(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        """Computes the step and merges it into out and lse."""
        ...

    def backward_(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics,
        dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
    ) -> None:  # fmt: skip
        """Adds the step's share to dq [s, b, h, d], and to dk and dv, rows of the hop's gradient buffer."""
        ...


_programs: weakref.WeakKeyDictionary[Hop, dict[Capabilities, tuple[Step, ...]]] = weakref.WeakKeyDictionary()


def program(hop: Hop, capabilities: Capabilities) -> tuple[Step, ...]:
    """A hop's kernel calls, worked out once for each hop and kept as long as the hop is."""
    made = _programs.setdefault(hop, {})
    if capabilities not in made:
        made[capabilities] = tuple(_steps(lower(hop.tiles, capabilities), hop.grad_shift, capabilities.varlen))
    return made[capabilities]


def prepare(hops: Sequence[Hop], capabilities: Capabilities, device: torch.device) -> None:
    """Works out the kernel calls of all hops and copies what they need to `device`, ahead of the first hop."""
    for hop in hops:
        for step in program(hop, capabilities):
            step.place(device)


def _steps(lowered: Lowered, grad_shift: Ints, varlen: bool) -> Iterator[Step]:
    tiles, reverse, shift = list(lowered.tiles), lowered.reverse.tolist(), grad_shift[lowered.parent].tolist()
    groups = _groups(tiles, lowered) if varlen else [[i] for i in range(len(tiles))]
    for group in groups:
        if len(group) == 1:
            yield _single(tiles[group[0]], shift[group[0]], reverse[group[0]])
        else:
            yield _packed([tiles[i] for i in group], [shift[i] for i in group], reverse[group[0]])


def _groups(tiles: list[Tile], lowered: Lowered) -> list[list[int]]:
    """Tiles that go into one call: of one batch and one window, sharing neither query nor key rows, in row order.

    Without shared key rows, each row of dk gets one addition, so that the sum does not depend on which came first.
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
    """The tile's band as a window aligned bottom right, as flash-attn has it; -1 for an open side."""
    corner = tile.k1 - tile.q1
    return -1 if tile.lo == -OPEN else corner - tile.lo, -1 if tile.hi == OPEN else tile.hi - corner


def _single(tile: Tile, shift: int, reverse: bool) -> _Single:
    slide = tile.k0 - tile.q0
    lo = tile.lo if tile.lo == -OPEN else tile.lo - slide
    hi = tile.hi if tile.hi == OPEN else tile.hi - slide
    if reverse:
        # Column - row changes sign and counts from the other corner; for the squares that are reversed, just the sign.
        lo, hi = -hi, -lo
    return _Single(
        slice(tile.q0, tile.q1), slice(tile.k0, tile.k1), slice(tile.k0 + shift, tile.k1 + shift), lo, hi, reverse
    )  # fmt: skip


@dataclass(frozen=True)
class _Single:
    """A tile alone: rows of the shard, rows of the key buffer and of its gradient buffer, and the band within the tile.

    `reverse` runs the tile with query and key order reversed, which turns an upper triangle into a causal one.
    """

    q: slice
    k: slice
    grad: slice
    lo: int
    hi: int
    reverse: bool

    def place(self, device: torch.device) -> None:
        return

    def attend(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (self._view(x, rows) for x, rows in ((q, self.q), (k, self.k), (v, self.k)))
        return kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=scale)

    def gradients(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out = (self._view(x, self.q) for x in (dout, q, out))
        k, v, lse_tile = self._view(k, self.k), self._view(v, self.k), lse.of(self.q)
        lse_tile = lse_tile.flip(2) if self.reverse else lse_tile
        return kernel.backward(dout, q, k, v, out, lse_tile, lo=self.lo, hi=self.hi, scale=scale)

    def forward_(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        out_tile, lse_tile = self.attend(kernel, q, k, v, scale)
        if self.reverse:
            out_tile, lse_tile = out_tile.flip(1), lse_tile.flip(2)
        merge_(out[self.q].transpose(0, 1), lse[..., self.q], out_tile, lse_tile)

    def backward_(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics,
        dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
    ) -> None:  # fmt: skip
        grads = self.gradients(kernel, dout, q, k, v, out, lse, scale)
        parts = [(x.flip(1) if self.reverse else x).transpose(0, 1) for x in grads]
        add_(*zip((dq[self.q], dk[self.grad], dv[self.grad]), parts, strict=True))

    def _view(self, x: Tensor, rows: slice) -> Tensor:
        """[s, b, ...] to the tile's [b, rows, ...]."""
        x = x[rows].transpose(0, 1)
        return x.flip(1) if self.reverse else x


def _packed(tiles: list[Tile], shift: list[int], reverse: bool) -> _Packed:
    spans = [(t.q0, t.q1) for t in tiles], [(t.k0, t.k1) for t in tiles]
    grads = [(t.k0 + s, t.k1 + s) for t, s in zip(tiles, shift, strict=True)]
    q, k, grad = (_Rows.of(ranges, reverse) for ranges in (*spans, grads))
    left, right = (-1, 0) if reverse else _window(tiles[0])
    return _Packed(q, k, grad, left, right, _ends(spans[0]), _ends(spans[1]))


def _ends(spans: list[tuple[int, int]]) -> Ints:
    return np.cumsum([0, *(end - start for start, end in spans)])


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a buffer in the order in which a packed call wants them: a slice where they lie in that order anyway."""

    span: slice
    index: Ints | None
    _tensors: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spans: list[tuple[int, int]], reverse: bool) -> _Rows:
        if not reverse and all(a[1] == b[0] for a, b in pairwise(spans)):
            return cls(slice(spans[0][0], spans[-1][1]), None)
        parts = [np.arange(start, end)[:: -1 if reverse else 1] for start, end in spans]
        return cls(slice(0, 0), np.concatenate(parts))

    def place(self, device: torch.device) -> None:
        if self.index is not None and device not in self._tensors:
            self._tensors[device] = _copied(self.index, device)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """The rows: a view where they are a slice, a copy else."""
        if self.index is None:
            return x.narrow(dim, self.span.start, self.span.stop - self.span.start)
        return x.index_select(dim, self._on(x.device))

    def put_(self, x: Tensor, rows: Tensor, dim: int = 0) -> None:
        """Writes back what `take` copied."""
        if self.index is not None:
            x.index_copy_(dim, self._on(x.device), rows)

    def _on(self, device: torch.device) -> Tensor:
        self.place(device)
        return self._tensors[device]

    def add_(self, x: Tensor, rows: Tensor) -> None:
        """Adds to x where the rows are gathered; none comes twice, so the result does not depend on the order."""
        x.index_add_(0, self._on(x.device), rows.to(x.dtype))


@dataclass(frozen=True, eq=False)
class _Packed:
    """Many tiles of one kind in one call. The batch goes with the heads: [t, b, h, d] is a stream of b * h heads."""

    q: _Rows
    k: _Rows
    grad: _Rows
    left: int
    right: int
    ends_q: Ints
    ends_k: Ints
    _packings: dict[torch.device, Packing] = field(default_factory=dict, repr=False)

    def place(self, device: torch.device) -> None:
        for rows in (self.q, self.k, self.grad):
            rows.place(device)
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
        lse_rows = lse.of(self.q.span) if self.q.index is None else self.q.take(lse.whole, 2)
        packing = self._packing(q.device)
        return cast(VarlenKernel, kernel).backward_varlen(dout, q, k, v, out, lse_rows.flatten(0, 1), packing, scale)

    def forward_(self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        out_tile, lse_tile = self.attend(kernel, q, k, v, scale)
        out_tile = out_tile.unflatten(1, q.shape[1:3]).transpose(0, 1)
        lse_tile = lse_tile.unflatten(0, q.shape[1:3])
        out_rows, lse_rows = self.q.take(out), self.q.take(lse, 2)
        merge_(out_rows.transpose(0, 1), lse_rows, out_tile, lse_tile)
        self.q.put_(out, out_rows)
        self.q.put_(lse, lse_rows, 2)

    def backward_(
        self, kernel: AttentionKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Statistics,
        dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
    ) -> None:  # fmt: skip
        grads = self.gradients(kernel, dout, q, k, v, out, lse, scale)
        pairs = []
        for total, rows, x in zip((dq, dk, dv), (self.q, self.grad, self.grad), grads, strict=True):
            part = x.unflatten(1, total.shape[1:3])
            if rows.index is None:
                pairs.append((total[rows.span], part))
            else:
                rows.add_(total, part)
        add_(*pairs)

    def _packing(self, device: torch.device) -> Packing:
        self.place(device)
        return self._packings[device]


def _copied(values: np.ndarray, device: torch.device) -> Tensor:
    """On `device`; nobody waits for the copy but the device itself."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
