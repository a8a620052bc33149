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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from cp_ring.errors import PlanError
from cp_ring.kernels.base import (
    OPEN,
    AttentionKernel,
    Capabilities,
    SizedVarlen,
    Sizes,
)
from cp_ring.kernels.packed import PackedCall
from cp_ring.kernels.queries import Queries
from cp_ring.ops.capture import capturing
from cp_ring.ops.segments import Segments
from cp_ring.plan.lower import Lowered, call_groups, lower
from cp_ring.plan.ranges import Ints
from cp_ring.plan.tables import Hop, RankPlan
from cp_ring.plan.tiles import Tile
from cp_ring.plan.updates import Partial, Update, gradient_updates, query_updates
from cp_ring.runtime import RUNTIME


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
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
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
            yield PackedCall.of(sequences, reverse[first], sizes)


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
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (q,), (k, v) = queries.part(self.q), self._keys(k, v)
        if self.reverse:
            q = q.flip(1)
        out, lse = kernel.forward(q, k, v, lo=self.lo, hi=self.hi, scale=scale)
        return out.transpose(0, 1), lse

    def gradients(
        self, kernel: AttentionKernel, queries: Queries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries.part(self.q)
        if self.reverse:
            dout, q, out, lse = dout.flip(1), q.flip(1), out.flip(1), lse.flip(2)
        k, v = self._keys(k, v)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, lo=self.lo, hi=self.hi, scale=scale)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def _keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """View the tile's keys and values as [b, keys, ...]."""
        if self.k.stop - self.k.start < k.shape[0]:
            k, v = k[self.k], v[self.k]
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        return (k.flip(1), v.flip(1)) if self.reverse else (k, v)
