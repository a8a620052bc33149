"""What a plan costs whatever the speeds: FLOPs, bytes that travel, and memory. For times see
`cp_ring.plan.costs.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.layout import Layout
from cp_ring.plan.plan import Plan
from cp_ring.plan.proof.verify import Report
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.head_split import HeadSplit, split_heads
from cp_ring.plan.tables import PlanTables
from cp_ring.plan.tiles import OPEN, Tiles
from cp_ring.plan.updates import MAX_PARTS


@dataclass(frozen=True, eq=False)
class Cost:
    """Cost of one layer's attention. Arrays are [cp, cp], rank by hop; FLOPs are float64, bytes
    int64.

    Forward FLOPs count two matrix products over the allowed pairs, backward FLOPs five. `bytes_in`
    and `bytes_out` are the keys and values of the forward pass; the backward pass moves them again,
    beside the gradients. `memory` names every buffer and its bytes on the rank where it is largest.
    `decode_flops` are those of the codec, beside attention: (forward, backward).
    """

    forward_flops: NDArray[np.float64]
    backward_flops: NDArray[np.float64]
    bytes_in: Ints
    bytes_out: Ints
    gradient_bytes_in: Ints
    gradient_bytes_out: Ints
    memory: dict[str, int]
    decode_flops: tuple[NDArray[np.float64], NDArray[np.float64]]


def cost(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> Cost:
    """The cost of a proven plan for tensors of these sizes."""
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
    """Bytes of every buffer on the rank where it is largest. Only the first two are kept from
    forward to backward.
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
    """What a codec needs beside the slots."""
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


def between_nodes(plan: PlanTables, ranks_per_node: int) -> float:
    """Share of the moved keys that go from one node to another, if each `ranks_per_node`
    neighboring ranks share a node.
    """
    keys = plan.transfers
    crosses = keys.sender // ranks_per_node != keys.receiver // ranks_per_node
    total = int(keys.tokens.sum())
    return int(keys.tokens[crosses].sum()) / total if total else 0.0


class Crossing(NamedTuple):
    """Bytes that one layer moves from nodes to other nodes, of all ranks together.

    keys: keys and values in the ring, in forward and again in backward. gradients: their gradients,
    in backward.
    exchange: queries, keys, values and outputs that are exchanged for heads, in forward.
    """

    keys: int
    gradients: int
    exchange: int


def crossing(plan: Plan, sizes: AttentionSizes, ranks_per_node: int) -> Crossing:
    """The bytes of a plan that cross nodes, where each `ranks_per_node` neighboring ranks share
    one.
    """
    ring, heads = plan.ring, plan.ulysses
    split, sizes = split_heads(sizes.heads, sizes.kv_heads, heads), sizes.exchanging(heads)
    moved = [0, 0]
    for place in range(heads):
        kv_heads = sum(len(group[place]) for group in split.repeated)
        for which, (table, bytes_per_token) in enumerate(
            zip((ring.transfers, ring.gradients), sizes.on_wire(kv_heads), strict=True)
        ):
            nodes = (
                (side * heads + place) // ranks_per_node for side in (table.sender, table.receiver)
            )
            moved[which] += int(table.tokens[np.not_equal(*nodes)].sum()) * bytes_per_token
    keys, gradients = moved
    return Crossing(
        keys, gradients, _exchange_between_nodes(plan.layout, split, sizes, ranks_per_node)
    )


class Exchanged(NamedTuple):
    """What one rank sends to another in the exchange of heads: so many tokens of so many heads, in
    all groups together.
    """

    sender: int
    receiver: int
    tokens: int
    queries: int
    keys: int


def exchanged(layout: Layout, split: HeadSplit) -> Iterator[Exchanged]:
    """The messages before attention. Those of the outputs, after it, go the other way, with as many
    heads as `queries`.
    """
    heads = [
        tuple(
            sum(end - start for start, end in (group[place] for group in spans))
            for spans in (split.queries, split.keys)
        )
        for place in range(split.size)
    ]
    for rank in range(layout.cp):
        first = rank - rank % split.size
        for place, other in enumerate(range(first, first + split.size)):
            if other != rank:
                yield Exchanged(rank, other, int(layout.tokens_per_rank[rank]), *heads[place])


def _exchange_between_nodes(
    layout: Layout, split: HeadSplit, sizes: AttentionSizes, ranks_per_node: int
) -> int:
    """Bytes of the exchange of heads of one forward pass that cross nodes."""
    of_query = (sizes.query_width + sizes.out_width) // sizes.heads * sizes.element
    of_key = sizes.key_width // sizes.kv_heads * sizes.element
    return sum(
        message.tokens * (message.queries * of_query + message.keys * of_key)
        for message in exchanged(layout, split)
        if message.sender // ranks_per_node != message.receiver // ranks_per_node
    )


def blocked_pairs(plan: PlanTables, block: int, padded: bool = True) -> NDArray[np.float64]:
    """Pairs in the blocks of each rank's tiles at each hop, [cp, cp].

    padded: whether a block at the end of a tile counts whole, so that a tile of 4 tokens costs a
    block.
    """
    tiles, place = plan.tiles, plan.tile_rank * plan.cp + plan.tile_hop
    slide = tiles.k0 - tiles.q0
    q, k = -(-(tiles.q1 - tiles.q0) // block), -(-(tiles.k1 - tiles.k0) // block)
    low = np.where(tiles.lo == -OPEN, -OPEN, -((slide + block - 1 - tiles.lo) // block))
    high = np.where(tiles.hi == OPEN, OPEN, (tiles.hi - slide + block - 1) // block)
    area = Tiles.columns(0, q, 0, k, low, high).fitted().area() * block * block
    if not padded:
        area = np.minimum(area, (tiles.q1 - tiles.q0) * (tiles.k1 - tiles.k0))
    return np.bincount(place, area, plan.cp * plan.cp).reshape(plan.cp, plan.cp)


def amounts(report: Report, sizes: AttentionSizes) -> tuple[int, int, int, int]:
    """Bytes that are kept, of these out and lse, of receive buffers, and of the other buffers at
    the time they are most.
    """
    buffers = memory(report, sizes)

    def together(begin: str) -> int:
        return sum(size for name, size in buffers.items() if name.startswith(begin))

    slots = buffers["both: key and value slots"]
    results = (
        int(report.tokens_per_rank.max()) * sizes.out_width * sizes.element + buffers["kept: lse"]
    )
    return (
        together("kept"),
        results,
        slots,
        together("both") - slots + max(together("forward"), together("backward")),
    )
