"""The work of a rank: the kernel calls of each hop, and the updates that add their results to
totals.

Tiles are lowered to tiles that the kernel supports, and small tiles are packed into one call.
`_make_calls` alone decides whether tiles go to a kernel one by one or packed. All of it is done
once for a plan, a kernel and a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from cp_ring.errors import PlanError
from cp_ring.kernels.base import AttentionKernel, Capabilities, SizedVarlen, Sizes
from cp_ring.kernels.calls import KernelCall, SingleCall
from cp_ring.kernels.packed import PackedCall
from cp_ring.ops.capture import capturing
from cp_ring.ops.segments import Segments
from cp_ring.plan.lower import Lowered, call_groups, lower
from cp_ring.plan.proof import check_work
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import Hop, RankPlan
from cp_ring.plan.schedule import LONG
from cp_ring.plan.tiles import OPEN
from cp_ring.plan.updates import Update, gradient_updates, query_updates
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True, eq=False)
class Work:
    """The kernel calls and updates of a rank in forward or in backward.

    calls: the kernel calls of each hop.
    queries: the updates of out in forward, of dq in backward.
    keys: in backward the updates of dk and dv by the index of the hop; 0 has those of the rank's
    own keys.
    """

    rank: int
    hops: Sequence[Hop]
    calls: Mapping[Hop, Sequence[KernelCall]]
    queries: Sequence[Segments]
    keys: Mapping[int, Sequence[Segments]]
    num_tokens: int

    @cached_property
    def own_keys(self) -> Mapping[int, Sequence[Segments]]:
        """Like `keys`, but for the sums of the kernel calls alone: gradients from other ranks are
        added elsewhere.
        """
        alone = [replace(hop, grad_receives=()) for hop in self.hops]
        calls = {hop: self.calls[one] for hop, one in zip(alone, self.hops, strict=True)}
        found = _key_updates(alone, calls, self.num_tokens)
        check_work(self.rank, self.num_tokens, alone, calls, self.queries, found)
        return found


_made: weakref.WeakKeyDictionary[RankPlan, dict[tuple[object, ...], Work]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def work_of(
    rank_plan: RankPlan,
    kernel: AttentionKernel,
    device: torch.device,
    backward: bool = False,
    few_keys: bool = False,
) -> Work:
    """Return a rank's work for a kernel. It is made once for kernels of the same abilities, and
    lives as long as the plan. With `few_keys`, calls have at most the keys of one shard.
    """
    sizes = None
    if isinstance(kernel, SizedVarlen):
        sizes = kernel.call_sizes(rank_plan.num_tokens, rank_plan.packed)
    made = _made.setdefault(rank_plan, {})
    key = kernel.capabilities, sizes, device, backward, few_keys
    if key not in made:
        made.setdefault(key, _make_work(rank_plan, *key))
    return made[key]


def _make_work(
    rank_plan: RankPlan,
    capabilities: Capabilities,
    sizes: Sizes | None,
    device: torch.device,
    backward: bool,
    few_keys: bool = False,
) -> Work:
    if capturing(device):  # tables would have to be copied from the host
        raise PlanError(
            "this call of ring attention is new, and a CUDA graph cannot begin with it: make it "
            "once, with its backward, before the capture"
        )
    hops = rank_plan.backward if backward else rank_plan.hops
    most = max(rank_plan.num_tokens, LONG) if few_keys else OPEN
    calls = {
        hop: tuple(
            call
            for part in _of_fewer_keys(hop, most)
            for call in kernel_calls(part, capabilities, sizes)
        )
        for hop in hops
    }
    parts = ([call.queries for call in calls[hop]] for hop in hops)
    queries = query_updates(parts, rank_plan.num_tokens, backward)
    rank, num_tokens = rank_plan.member, rank_plan.num_tokens
    keys = _key_updates(hops, calls, num_tokens) if backward else {}
    work = Work(rank, hops, calls, _segments(queries), keys, num_tokens)
    check_work(rank, num_tokens, hops, calls, work.queries, work.keys)
    for call in (call for hop in hops for call in calls[hop]):
        call.prepare(device)
    if device.type == "cuda":
        for segments in (
            *work.queries,
            *(segments for updates in work.keys.values() for segments in updates),
        ):
            segments.blocks.on(device)
    return work


def _of_fewer_keys(hop: Hop, most: int) -> Iterator[Hop]:
    """Yield parts of a hop whose tiles have at most `most` keys. Where query heads share keys, GPU
    kernels hold the gradients of a call's keys for each query head, which is more memory than all
    else of a hop.
    """
    k0, keys = hop.tiles.k0, hop.tiles.k1 - hop.tiles.k0
    for part in range(-(-int(keys.max(initial=1)) // most)):
        tile = np.flatnonzero(keys > part * most)
        begin = k0[tile] + part * most
        tiles = hop.tiles[tile].within(k0=begin, k1=begin + most)
        yield replace(hop, tiles=tiles, grad_shift=hop.grad_shift[tile])


def _key_updates(
    hops: Sequence[Hop], calls: Mapping[Hop, Sequence[KernelCall]], num_tokens: int
) -> Mapping[int, Sequence[Segments]]:
    """Return `Work.keys`."""
    parts = [[call.keys for call in calls[hop]] for hop in hops]
    updates = gradient_updates(hops, parts, num_tokens)
    return {index: _segments(of_hop) for index, of_hop in updates.items()}


def _segments(updates: Sequence[Update]) -> tuple[Segments, ...]:
    return tuple(Segments(*update) for update in updates)


def kernel_calls(
    hop: Hop, capabilities: Capabilities, sizes: Sizes | None = None
) -> tuple[KernelCall, ...]:
    """Return a hop's kernel calls. Packed ones are filled up to `sizes`."""
    tiles = hop.tiles.trimmed()
    causal = len(hop.tiles) == 1 and tiles.causal.tolist() == [True]
    if causal and not (sizes and sizes.packs(tiles)[0]):
        # perhaps of fewer keys than queries
        return (SingleCall.of(next(iter(tiles)), int(hop.grad_shift[0]), False),)
    return tuple(_make_calls(lower(hop.tiles, capabilities), hop.grad_shift, capabilities, sizes))


def _make_calls(
    lowered: Lowered, grad_shift: Ints, capabilities: Capabilities, sizes: Sizes | None
) -> Iterator[KernelCall]:
    """Make a single call of each group of one tile, unless `sizes` packs it, and a packed call of
    each other group. Only kernels with `capabilities.varlen` have such groups.
    """
    tiles = list(lowered.tiles)
    reverse, windows = lowered.reverse.tolist(), list(zip(*lowered.windows.tolist(), strict=True))
    shift = grad_shift[lowered.parent].tolist()
    packs = [False] * len(tiles) if sizes is None else sizes.packs(lowered.tiles).tolist()
    for group in call_groups(lowered, capabilities.varlen):
        first = group[0][0]
        if group == [[first]] and not packs[first]:
            yield SingleCall.of(tiles[first], shift[first], reverse[first])
        else:
            sequences = [[(tiles[i], shift[i]) for i in sequence] for sequence in group]
            yield PackedCall.of(sequences, windows[first], reverse[first], sizes)
