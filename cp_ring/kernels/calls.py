"""The work of a rank: the kernel calls of each hop, and the updates that add their results to
totals.

Tiles are lowered to tiles that the kernel supports, and small tiles are packed into one call.
`_make_calls` alone decides whether tiles go to a kernel one by one or packed. All of it is done
once for a plan, a kernel and a device.

Tensors have tokens first: q [s, b, h, d] is a rank's shard, k [u, b, g, d] and v [u, b, g, e] are a
hop's key buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cp_ring.errors import PlanError
from cp_ring.kernels.base import (
    OPEN,
    AttentionKernel,
    Capabilities,
    Packing,
    Room,
    SizedVarlen,
    Sizes,
    VarlenKernel,
)
from cp_ring.ops.capture import capturing
from cp_ring.ops.segments import Segments
from cp_ring.plan.lower import Lowered, call_groups, lower
from cp_ring.plan.ranges import Ints
from cp_ring.plan.tables import Hop, RankPlan
from cp_ring.plan.tiles import Tile
from cp_ring.plan.updates import Partial, Update, gradient_updates, query_updates
from cp_ring.runtime import RUNTIME


class Queries:
    """What backward knows of all queries: dout [s, b, h, e], q, the merged out and lse [b, h, s].
    Consecutive calls with the same queries share their views, and one contiguous copy of lse.
    """

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor):
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self._tokens: slice | None = None
        self._part: tuple[Tensor, Tensor, Tensor, Tensor]

    def part(self, tokens: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return dout, q and out [b, tokens, ...] and lse [b, h, tokens] of these queries."""
        if self._tokens != tokens:
            dout, q, out = (x[tokens].transpose(0, 1) for x in (self.dout, self.q, self.out))
            self._tokens = tokens
            self._part = dout, q, out, self.lse[..., tokens].contiguous()
        return self._part


class KernelCall(Protocol):
    """One kernel call of a hop: a single tile, or many packed tiles.

    Results have the call's own order of tokens. `queries` says to which tokens of out and dq they
    belong, and `keys` to which tokens of the hop's gradient buffer.
    """

    @property
    def queries(self) -> Partial: ...

    @property
    def keys(self) -> Partial: ...

    def prepare(self, device: torch.device) -> None:
        """Copy the index tensors of the call to `device` once, before the first hop."""
        ...

    def attend(
        self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out [t, b, h, e] and lse [b, h, t] of the call's queries, from q of the shard and
        k, v of the key buffer.
        """
        ...

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the call's share of dq [t, b, h, d], dk [u, b, g, d] and dv [u, b, g, e]."""
        ...


@dataclass(frozen=True, eq=False)
class Work:
    """The kernel calls and updates of a rank in forward or in backward.

    calls: the kernel calls of each hop.
    queries: the updates of out in forward, of dq in backward.
    keys: in backward the updates of dk and dv by the index of the hop; 0 has those of the rank's
    own keys.
    """

    hops: Sequence[Hop]
    calls: Mapping[Hop, Sequence[KernelCall]]
    queries: Sequence[Segments]
    keys: Mapping[int, Sequence[Segments]]
    num_keys: int

    @property
    def num_calls(self) -> int:
        return sum(map(len, self.calls.values()))

    @cached_property
    def own_keys(self) -> Mapping[int, Sequence[Segments]]:
        """Like `keys`, but for the sums of the kernel calls alone: gradients from other ranks are
        added elsewhere.
        """
        alone = [replace(hop, grad_receives=()) for hop in self.hops]
        updates = gradient_updates(
            alone, [[call.keys for call in self.calls[hop]] for hop in self.hops], self.num_keys
        )
        return {index: _segments(of_hop) for index, of_hop in updates.items()}


_made: weakref.WeakKeyDictionary[RankPlan, dict[tuple[object, ...], Work]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def work_of(
    rank_plan: RankPlan, kernel: AttentionKernel, device: torch.device, backward: bool = False
) -> Work:
    """Return a rank's work for a kernel. It is made once for kernels of the same abilities, and
    lives as long as the plan.
    """
    sizes = None
    if isinstance(kernel, SizedVarlen):
        sizes = kernel.call_sizes(rank_plan.num_tokens, rank_plan.packed)
    made = _made.setdefault(rank_plan, {})
    key = kernel.capabilities, sizes, device, backward
    if key not in made:
        made.setdefault(key, _make_work(rank_plan, kernel.capabilities, sizes, device, backward))
    return made[key]


def _make_work(
    rank_plan: RankPlan,
    capabilities: Capabilities,
    sizes: Sizes | None,
    device: torch.device,
    backward: bool,
) -> Work:
    if capturing(device):  # tables would have to be copied from the host
        raise PlanError(
            "this call of ring attention is new, and a CUDA graph cannot begin with it: make it "
            "once, with its backward, before the capture"
        )
    hops = tuple(rank_plan.backward if backward else rank_plan.hops)
    calls = {hop: kernel_calls(hop, capabilities, sizes) for hop in hops}
    queries = query_updates(
        ([call.queries for call in calls[hop]] for hop in hops), rank_plan.num_tokens
    )
    keys: dict[int, tuple[Update, ...]] = {}
    if backward:
        keys = gradient_updates(
            hops, [[call.keys for call in calls[hop]] for hop in hops], rank_plan.num_tokens
        )
    of_keys = {index: _segments(updates) for index, updates in keys.items()}
    work = Work(hops, calls, _segments(queries), of_keys, rank_plan.num_tokens)
    for call in (call for hop in hops for call in calls[hop]):
        call.prepare(device)
    if device.type == "cuda":
        for segments in (
            *work.queries,
            *(segments for updates in work.keys.values() for segments in updates),
        ):
            segments.blocks(device)
    return work


def _segments(updates: Sequence[Update]) -> tuple[Segments, ...]:
    return tuple(Segments(update.segments, update.whole) for update in updates)


def kernel_calls(
    hop: Hop, capabilities: Capabilities, sizes: Sizes | None = None
) -> tuple[KernelCall, ...]:
    """Return a hop's kernel calls. Packed ones are filled up to `sizes`."""
    return tuple(_make_calls(lower(hop.tiles, capabilities), hop.grad_shift, capabilities, sizes))


def _make_calls(
    lowered: Lowered, grad_shift: Ints, capabilities: Capabilities, sizes: Sizes | None
) -> Iterator[KernelCall]:
    """Make a single call of each group of one tile, unless `sizes` packs it, and a packed call of
    each other group. Only kernels with `capabilities.varlen` have such groups.
    """
    tiles = list(lowered.tiles)
    reverse = lowered.reverse.tolist()
    shift = grad_shift[lowered.parent].tolist()
    packs = [False] * len(tiles) if sizes is None else sizes.packs(lowered.tiles).tolist()
    for group in call_groups(lowered, capabilities.varlen):
        first = group[0][0]
        if group == [[first]] and not packs[first]:
            yield _single(tiles[first], shift[first], reverse[first])
        else:
            sequences = [[(tiles[i], shift[i]) for i in sequence] for sequence in group]
            yield _packed(sequences, reverse[first], sizes)


def _window(tile: Tile) -> tuple[int, int]:
    """Return the tile's band as a window aligned bottom right, as flash-attn defines it; -1 for an
    open side.
    """
    corner = tile.k1 - tile.q1
    return -1 if tile.lo == -OPEN else corner - tile.lo, -1 if tile.hi == OPEN else tile.hi - corner


def _single(tile: Tile, shift: int, reverse: bool) -> _Single:
    slide = tile.k0 - tile.q0
    lo = tile.lo if tile.lo == -OPEN else tile.lo - slide
    hi = tile.hi if tile.hi == OPEN else tile.hi - slide
    if reverse:
        # In reverse order, key - query changes its sign. Only squares are reversed, so both corners
        # give the same offset.
        lo, hi = -hi, -lo
    queries = Partial.of([(tile.q0, tile.q1)], reverse=reverse)
    keys = Partial.of([(tile.k0 + shift, tile.k1 + shift)], reverse=reverse)
    return _Single(slice(tile.q0, tile.q1), slice(tile.k0, tile.k1), lo, hi, reverse, queries, keys)


@dataclass(frozen=True, eq=False)
class _Single:
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

    def prepare(self, device: torch.device) -> None:
        return

    def attend(
        self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self._view(q, self.q), self._view(k, self.k), self._view(v, self.k)
        out, lse = kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=scale)
        return out.transpose(0, 1), lse

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries.part(self.q)
        if self.reverse:
            dout, q, out, lse = dout.flip(1), q.flip(1), out.flip(1), lse.flip(2)
        k, v = self._view(k, self.k), self._view(v, self.k)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, lo=self.lo, hi=self.hi, scale=scale)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def _view(self, x: Tensor, tokens: slice) -> Tensor:
        """View the tile's tokens of x [s, b, ...] as [b, tokens, ...]."""
        x = (x if tokens.stop - tokens.start == x.shape[0] else x[tokens]).transpose(0, 1)
        return x.flip(1) if self.reverse else x


def _packed(sequences: list[list[tuple[Tile, int]]], reverse: bool, sizes: Sizes | None) -> _Packed:
    """Make the call of sequences of tiles. Each tile comes with the shift from its keys to their
    gradients.
    """
    tiles = [tile for sequence in sequences for tile in sequence]
    first = [sequence[0][0] for sequence in sequences]
    q, k = [(t.q0, t.q1) for t in first], [(t.k0, t.k1) for t, _ in tiles]
    grads = [(t.k0 + shift, t.k1 + shift) for t, shift in tiles]
    left, right = (-1, 0) if reverse else _window(first[0])
    queries, keys = Partial.of(q, reverse=reverse), Partial.of(grads, reverse=reverse)
    of_q, of_k = sizes.rooms(_count(q), _count(k), len(sequences)) if sizes else (Room(), Room())
    lengths = [sum(t.k1 - t.k0 for t, _ in sequence) for sequence in sequences]
    return _Packed(
        _Side.of(q, [q1 - q0 for q0, q1 in q], reverse, of_q),
        _Side.of(k, lengths, reverse, of_k),
        left,
        right,
        queries,
        keys,
    )


def _count(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


@dataclass(frozen=True, eq=False)
class _Side:
    """The queries of a packed call, or its keys.

    tokens: the tokens of the buffer, in the order of the call.
    ends: where each sequence ends, int32 [sequences + 1].
    longest: the tokens of the longest sequence, or more.
    count: the tokens of all sequences, after which the call may have tokens of none.
    """

    tokens: _Tokens
    ends: NDArray[np.int32]
    longest: int
    count: int

    @classmethod
    def of(
        cls, spans: list[tuple[int, int]], lengths: list[int], reverse: bool, room: Room
    ) -> _Side:
        """Take the tokens of `spans` as sequences of these lengths, and fill them up to `room`."""
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        empty = max(room.sequences - len(lengths), 0)
        return cls(
            _Tokens.of(spans, reverse, room.tokens),
            np.pad(ends, (0, empty), mode="edge"),
            max(*lengths, room.longest),
            int(ends[-1]),
        )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokens of a buffer in the order of a packed call: a slice if the buffer has this order, else
    an index.
    """

    span: slice
    index: Ints | None
    _tensors: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, spans: list[tuple[int, int]], reverse: bool, least: int) -> _Tokens:
        """Take the tokens of `spans`, then token 0 until there are at least `least`."""
        missing = least - _count(spans)
        if not reverse and missing <= 0 and all(a[1] == b[0] for a, b in pairwise(spans)):
            return cls(slice(spans[0][0], spans[-1][1]), None)
        parts = [np.arange(start, end)[:: -1 if reverse else 1] for start, end in spans]
        return cls(slice(0, 0), np.concatenate([*parts, np.zeros(max(missing, 0), np.int64)]))

    def prepare(self, device: torch.device) -> None:
        if self.index is not None and device not in self._tensors:
            self._tensors[device] = _copied(self.index, device)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the tokens of x: a view of a slice, or a copy by index."""
        if self.index is None:
            return x.narrow(dim, self.span.start, self.span.stop - self.span.start)
        return x.index_select(dim, self._on(x.device))

    def _on(self, device: torch.device) -> Tensor:
        self.prepare(device)
        return self._tensors[device]


@dataclass(frozen=True, eq=False)
class _Packed:
    """Many sequences with one window in one call. Batch rows become heads: [t, b, h, d] is one
    stream of b * h heads.
    """

    q: _Side
    k: _Side
    left: int
    right: int
    queries: Partial
    keys: Partial
    _packings: dict[torch.device, Packing] = field(default_factory=dict, repr=False)

    def prepare(self, device: torch.device) -> None:
        for side in (self.q, self.k):
            side.tokens.prepare(device)
        if device not in self._packings:
            cu_q, cu_k = (_copied(side.ends, device) for side in (self.q, self.k))
            self._packings[device] = Packing(
                cu_q, cu_k, self.q.longest, self.k.longest, self.left, self.right
            )

    def attend(
        self, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, count = q.shape[1:3], self.q.count
        q, k, v = (
            side.tokens.take(x).flatten(1, 2) for side, x in ((self.q, q), (self.k, k), (self.k, v))
        )
        out, lse = cast(VarlenKernel, kernel).forward_varlen(
            q, k, v, self._packing(q.device), scale
        )
        return out[:count].unflatten(1, heads), lse[:, :count].unflatten(0, heads)

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, mine = k.shape[1], self.q.tokens
        dout, q, out = (mine.take(x).flatten(1, 2) for x in (queries.dout, queries.q, queries.out))
        k, v = (self.k.tokens.take(x).flatten(1, 2) for x in (k, v))
        lse = mine.take(queries.lse, 2).contiguous().flatten(0, 1)
        grads = cast(VarlenKernel, kernel).backward_varlen(
            dout, q, k, v, out, lse, self._packing(k.device), scale
        )
        counts = self.q.count, self.k.count, self.k.count
        dq, dk, dv = (
            x[:count].unflatten(1, (b, -1)) for x, count in zip(grads, counts, strict=True)
        )
        return dq, dk, dv

    def _packing(self, device: torch.device) -> Packing:
        self.prepare(device)
        return self._packings[device]


def _copied(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy the values to `device`. On CUDA the copy does not block the host."""
    host = torch.from_numpy(values)
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )
