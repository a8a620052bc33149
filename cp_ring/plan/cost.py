"""The cost of one layer's attention by a proven plan: FLOP, bytes that travel, memory, and time by
one formula (see `cp_ring.plan.hops`). Everything that chooses or predicts reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.hops import (
    block_seconds,
    exchange_seconds,
    head_groups,
    longest_blocks,
    stages,
)
from cp_ring.plan.lower import FULL, REVERSED, band_kinds
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.ranges import Ints, depth
from cp_ring.plan.records import PlanTables, Transfers
from cp_ring.plan.report import Report
from cp_ring.plan.report import report as report_of
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.tiles import OPEN
from cp_ring.plan.updates import MAX_PARTS

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of one layer's attention. Arrays are [cp, cp], rank by hop; FLOPs are float64, bytes
    int64.

    Forward FLOPs count two matrix products over the allowed pairs, backward FLOPs five. `bytes_in`
    and `bytes_out` are the keys and values of the forward pass; the backward pass moves them again,
    beside the gradients. `memory` names every buffer and its bytes on the rank where it is largest.
    `decode_flops` are the codec's FLOPs: (forward, backward).
    """

    forward_flops: Floats
    backward_flops: Floats
    bytes_in: Ints
    bytes_out: Ints
    gradient_bytes_in: Ints
    gradient_bytes_out: Ints
    memory: dict[str, int]
    decode_flops: tuple[Floats, Floats]


def cost(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> Cost:
    """Return the cost of a proven plan for tensors of these sizes."""
    work = report.work.astype(np.float64)
    keys, gradients = sizes.on_wire()
    forward, backward = sizes.pair_flops
    arriving = report.keys_in.astype(np.float64) * sizes.batch
    decode_forward, decode_backward = sizes.codec.decode_flops(sizes.kv_heads, sizes.latent)
    return Cost(
        forward_flops=work * forward,
        backward_flops=work * backward,
        bytes_in=report.keys_in * keys,
        bytes_out=report.keys_out * keys,
        gradient_bytes_in=report.grads_in * gradients,
        gradient_bytes_out=report.grads_out * gradients,
        memory=memory(report, sizes, num_slots),
        decode_flops=(arriving * decode_forward, arriving * decode_backward),
    )


def memory(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> dict[str, int]:
    """Return the bytes of every buffer on the rank where it is largest. Only the first two buffers
    are kept from forward to backward.
    """
    tokens = int(report.tokens_per_rank.max())
    width, element, wire, float32 = sizes.key_width, sizes.element, sizes.wire_element, 4
    heads = sizes.batch * sizes.heads
    arriving, leaving, returning = (
        int(table.max(initial=0)) for table in (report.keys_in, report.grads_out, report.grads_in)
    )
    return {
        "kept: q, k, v, out": tokens * (sizes.query_width + sizes.out_width + width) * element,
        "kept: lse": tokens * heads * float32,
        "forward: partial results of out": MAX_PARTS * tokens * sizes.out_width * element,
        "forward: out in float32": tokens * sizes.out_width * float32,
        "both: key and value slots": num_slots * arriving * sizes.wire_key_bytes,
        **({} if sizes.codec.plain else _codec_memory(sizes, tokens, arriving, leaving)),
        "backward: partial results of dq": MAX_PARTS * tokens * sizes.query_width * element,
        "backward: dq in float32": tokens * sizes.query_width * float32,
        "backward: dk, dv in float32": tokens * width * float32,
        "backward: a hop's dk, dv in float32": leaving * width * float32,
        "backward: a hop's dk, dv that leave": leaving * sizes.wire_gradient_width * wire,
        "backward: dk, dv that arrive": returning * sizes.wire_gradient_width * wire,
    }


def _codec_memory(
    sizes: AttentionSizes, tokens: int, arriving: int, leaving: int
) -> dict[str, int]:
    """Return the bytes of a codec's buffers other than the slots."""
    buffers = {
        "both: own keys and values, encoded": tokens * sizes.wire_key_bytes,
        "both: a hop's keys and values, decoded": arriving * sizes.key_width * sizes.element,
    }
    if sizes.codec.latent and sizes.latent is not None:
        weight = sizes.kv_heads * (sizes.latent.nope + sizes.latent.value) * sizes.latent.latent
        buffers["backward: a hop's dk, dv before the up-projection"] = (
            leaving * sizes.key_width * sizes.element
        )
        buffers["backward: gradients of latents in float32"] = (
            tokens * sizes.wire_gradient_width * 4
        )
        buffers["backward: gradient of the up-projection in float32"] = weight * 4
    return buffers


def bytes_between_nodes(plan: Plan, sizes: AttentionSizes, ranks_per_node: int) -> int:
    """Return the bytes of keys and values that the ring sends to other nodes in forward, summed
    over ranks. Each `ranks_per_node` neighboring ranks share a node.
    """
    near = _members_of_node(ranks_per_node, plan.ulysses)
    keys = plan.ring.transfers
    crosses = keys.sender // near != keys.receiver // near
    own = sizes.of_rank(plan.ulysses).on_wire()[0]
    return int(keys.tokens[crosses].sum()) * own * plan.ulysses


@dataclass(frozen=True, eq=False)
class AttentionTime:
    """Predicted seconds of one layer's attention, for forward and for backward.

    compute, moving: [members, stages], the seconds that each stage of each member of the ring
    computes, and that data moves meanwhile.
    hops: the hop of each stage of forward.
    exchange: the seconds of the exchange of heads that nothing hides.
    ideal: one kernel call on the whole sequence, divided evenly among the ranks.
    """

    compute: tuple[Floats, Floats]
    moving: tuple[Floats, Floats]
    hops: Ints
    exchange: tuple[float, float]
    ideal: tuple[float, float]

    @property
    def stages(self) -> tuple[Floats, Floats]:
        """The seconds of each stage."""
        forward, backward = map(np.maximum, self.compute, self.moving)
        return forward, backward

    def _slowest(self, passes: int) -> tuple[float, float]:
        """Return the seconds of the slowest rank in the first `passes` of forward and backward, and
        the part of them in which it waits.
        """
        total = np.sum([stages.sum(1) for stages in self.stages[:passes]], axis=0)
        busy = np.sum([compute.sum(1) for compute in self.compute[:passes]], axis=0)
        exchange, rank = sum(self.exchange[:passes]), int(np.argmax(total))
        return float(total[rank] + exchange), float(total[rank] - busy[rank] + exchange)

    @property
    def forward(self) -> float:
        """The seconds of forward on the slowest rank."""
        return self._slowest(1)[0]

    @property
    def both(self) -> float:
        """The seconds of forward and backward together on the slowest rank."""
        return self._slowest(2)[0]

    @property
    def waits(self) -> tuple[float, float]:
        """The seconds of `forward` and of `both` that the slowest rank waits for messages."""
        return self._slowest(1)[1], self._slowest(2)[1]


def attention_time(
    plan: Plan,
    report: Report,
    sizes: AttentionSizes,
    rates: Rates = RATES,
    ranks_per_node: int = 1,
) -> AttentionTime:
    """Return the time of a proven plan for a layer of these sizes, all heads together. Each
    `ranks_per_node` neighboring ranks share a node.
    """
    ring, heads = plan.ring, plan.ulysses
    own, hops = sizes.of_rank(heads), ring.schedule[-1] + 1
    groups = head_groups(sizes, heads)
    near = _members_of_node(ranks_per_node, heads)
    costs = cost(report, own)
    keys, gradients = (
        _link_seconds(table, width, near, (ring.cp, hops), rates)
        for table, width in zip((ring.transfers, ring.gradients), own.on_wire(), strict=True)
    )
    calls = groups * rates.call * kernel_calls(ring, hops)
    flops = (costs.forward_flops, costs.backward_flops)
    longest = longest_blocks(ring.tiles, ring.tile_rank * hops + ring.tile_hop, ring.cp * hops)
    blocks = block_seconds(longest.reshape(2, ring.cp, hops), own, groups, rates)
    there, back = (
        np.maximum(attention[:, :hops] / rates.flops, block)
        + decode[:, :hops] / rates.flops
        + calls
        for attention, block, decode in zip(flops, blocks, costs.decode_flops, strict=True)
    )
    compute, moving, order = stages(there, back, keys, gradients)
    tokens = int(plan.layout.tokens_per_rank.max())
    forward, backward = (
        exchange_seconds(tokens, sizes, heads, ranks_per_node, rates, float(of.sum(1).max()))
        for of in map(np.maximum, compute, moving)
    )
    return AttentionTime(
        compute,
        moving,
        order,
        exchange=(forward, backward),
        ideal=(
            float(costs.forward_flops.sum()) / ring.cp / rates.flops,
            float(costs.backward_flops.sum()) / ring.cp / rates.flops,
        ),
    )


def _members_of_node(ranks_per_node: int, heads: int) -> int:
    """Return the number of members of the ring on a node: 1 if a node does not hold whole members,
    or holds one.
    """
    return ranks_per_node // heads if ranks_per_node % heads == 0 else 1


def _link_seconds(
    table: Transfers, width: int, near: int, shape: tuple[int, int], rates: Rates
) -> Floats:
    """Return the seconds in which the messages of each member's hop travel, [members, hops]: in and
    out, inside nodes of `near` members and between nodes, at the same time.
    """
    crosses = table.sender // near != table.receiver // near
    seconds = np.zeros(shape)
    for link, rate in ((~crosses, rates.inside), (crosses, rates.between)):
        for member in (table.receiver, table.sender):
            place = (member * shape[1] + table.hop)[link]
            size = np.bincount(place, table.tokens[link] * width, shape[0] * shape[1])
            seconds = np.maximum(seconds, size.reshape(shape) / rate)
    return seconds


def kernel_calls(ring: PlanTables, hops: int) -> Floats:
    """Return the number of kernel calls of each member's hop, [members, hops], by a kernel that
    takes many sequences in a call (`cp_ring.plan.lower.call_groups`).

    The number for each kind and window is the largest number of sequences that share a query or a
    key.
    """
    tiles, cp = ring.tiles, ring.cp
    kind, corner = band_kinds(tiles), tiles.k1 - tiles.q1
    left = np.where((tiles.lo == -OPEN) | (kind == REVERSED), -1, corner - tiles.lo)
    right = np.where((tiles.hi == OPEN) | (kind == REVERSED), -1, tiles.hi - corner)
    place = ring.tile_rank * hops + ring.tile_hop
    order = np.lexsort((tiles.q1, tiles.q0, right, left, kind, place))
    tiles, source, place = tiles[order], ring.tile_source[order], place[order]
    words = np.stack([place, kind[order], left[order], right[order]])
    starts = (words[:, 1:] != words[:, :-1]).any(0)
    call = np.cumsum(np.append(False, starts))
    # rectangles over the same queries are one sequence
    starts |= (tiles.q0[1:] != tiles.q0[:-1]) | (tiles.q1[1:] != tiles.q1[:-1])
    first = np.flatnonzero(np.append(True, starts | (kind[order][1:] != FULL))[: len(tiles)])
    number = int(call[-1]) + 1 if len(tiles) else 0
    by_queries = depth(call[first], tiles.q0[first], tiles.q1[first], number)
    by_keys = depth(call * cp + source, tiles.k0, tiles.k1, number * cp).reshape(number, cp)
    of_call = np.maximum(by_queries, by_keys.max(1, initial=0))
    calls = np.bincount(place[np.unique(call, return_index=True)[1]], of_call, cp * hops)
    return calls.reshape(cp, hops)


def heads_to_try(cp: int, sizes: AttentionSizes, ranks_per_node: int) -> list[int]:
    """Return how many of `cp` ranks may exchange heads: 1, and in a group of several nodes the
    three largest numbers that divide the ranks of a node and the heads, or, if there are fewer, the
    ranks of several nodes too. Each `ranks_per_node` neighboring ranks share a node.
    """
    near = ranks_per_node
    fitting = [
        heads
        for heads in (range(2, cp + 1) if 1 < near < cp else ())
        if not (cp % heads or (near % heads and heads % near))
        and not unsplit(sizes.heads, sizes.kv_heads, heads)
    ]
    inside = [heads for heads in fitting if heads <= near]
    return [1, *inside[-3:], *fitting[len(inside) :]][:4]


def fastest_heads(
    layers: Sequence[tuple[Mask, int]],
    cp: int,
    spec: PlanSpec,
    sizes: AttentionSizes,
    ranks_per_node: int = 1,
) -> tuple[int, dict[int, float]]:
    """Return how many neighboring ranks should exchange heads for the least time of attention in
    layers with these masks (mask, number of layers), and the seconds of each number of
    `heads_to_try`. Each `ranks_per_node` neighboring ranks share a node.

    Of numbers that differ by less than a hundredth, the smallest is taken. Nothing is proven here:
    the plan that is made of the result is.
    """
    numbers = heads_to_try(cp, sizes, ranks_per_node)
    if len(numbers) == 1:
        return 1, {}
    spec = replace(spec, layout=spec.layout_of(layers[0][0], cp))
    seconds = {}
    for heads in numbers:
        plans = [(replace(spec, ulysses=heads).build(mask, cp), n) for mask, n in layers]
        seconds[heads] = sum(
            count * attention_time(plan, report_of(plan.ring, 2), sizes, RATES, ranks_per_node).both
            for plan, count in plans
        )
    least = min(seconds.values())
    return next(heads for heads, time in seconds.items() if time <= 1.01 * least), seconds


@dataclass(frozen=True)
class FastestHeads:
    """The choice, for each mask, of how many ranks exchange heads. It is made for these sizes of
    attention and this number of neighboring ranks that share a node.
    """

    sizes: AttentionSizes
    ranks_per_node: int

    def heads_of(self, mask: Mask, cp: int, spec: PlanSpec) -> int:
        return fastest_heads([(mask, 1)], cp, spec, self.sizes, self.ranks_per_node)[0]
