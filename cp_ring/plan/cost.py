"""What a plan costs: FLOPs, bytes, memory, and a prediction of how compute and transfers overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.head_split import HeadSplit, split_heads
from cp_ring.plan.layout import Layout
from cp_ring.plan.lower import Capabilities, lower
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rank_plan import rank_tiles
from cp_ring.plan.rates import RATES, Rates
from cp_ring.plan.tables import Hop, PlanTables, RankPlan
from cp_ring.plan.updates import MAX_PARTS, Partial, Update, gradient_updates, query_updates
from cp_ring.plan.verify import Report
from cp_ring.plan.wires import WIRES, LatentSizes, Wire

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one attention layer's tensors: heads, elements of a head, batch rows, and dtypes.

    `value_dim` is by default `head_dim`. `dtype` is that of queries, keys and values, `wire_dtype` that of gradients that
    travel, by default the same. `wire` is the codec of keys that travel, `latent` the sizes that the codec of that name needs.
    Raises `PlanError` for sizes that do not fit together.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    dtype: str = "bf16"
    wire_dtype: str | None = None
    batch: int = 1
    wire: str = "plain"
    latent: LatentSizes | None = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise PlanError(f"{self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.head_dim < 1 or (self.value_dim or 1) < 1 or self.batch < 1:
            raise PlanError(f"head_dim {self.head_dim}, value_dim {self.value_dim}, batch {self.batch}: each must be at least 1")
        for name in (self.dtype, self.wire_dtype or self.dtype):
            if name not in DTYPE_BYTES:
                raise PlanError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
        if self.wire not in WIRES:
            raise PlanError(f"wire {self.wire!r}: known are {', '.join(WIRES)}")
        if self.codec.latent and self.latent is None:
            raise PlanError(f"wire {self.wire} needs the sizes of multi-latent attention")

    @property
    def codec(self) -> Wire:
        """The widths of the codec."""
        return WIRES[self.wire]

    @property
    def wire_key_bytes(self) -> int:
        """Bytes of a token's keys and values as they travel, in all batch rows."""
        return self.on_wire()[0]

    @property
    def wire_gradient_width(self) -> int:
        """Elements of a token's gradients as they travel, in all batch rows."""
        return self.on_wire()[1] // self.wire_element

    @property
    def element(self) -> int:
        """Bytes of an element of queries, keys and values."""
        return DTYPE_BYTES[self.dtype]

    @property
    def wire_element(self) -> int:
        """Bytes of an element of a gradient that travels."""
        return DTYPE_BYTES[self.wire_dtype or self.dtype]

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, in all batch rows."""
        return self.batch * self.heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Elements of a token's output, in all batch rows."""
        return self.batch * self.heads * (self.value_dim or self.head_dim)

    @property
    def key_width(self) -> int:
        """Elements of a token's keys and values, in all batch rows."""
        return self.batch * self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def on_wire(self, kv_heads: int | None = None) -> tuple[int, int]:
        """Bytes of a token in the ring, of all key/value heads or of so many: (keys and values, their gradients)."""
        heads, size = self.kv_heads if kv_heads is None else kv_heads, self.head_dim + (self.value_dim or self.head_dim)
        keys = self.codec.key_bytes(heads, size, self.element, self.latent)
        return self.batch * keys, self.batch * self.codec.elements(heads, size, self.latent) * self.wire_element

    def exchanging(self, heads: int) -> AttentionSizes:
        """The sizes where ranks exchange heads: latents have none, so that keys travel as they are."""
        return replace(self, wire="plain") if heads > 1 and self.codec.latent else self

    def of_rank(self, heads: int) -> AttentionSizes:
        """The sizes of a rank that exchanges tokens for heads with `heads` ranks, itself included; see `split_heads`."""
        split = split_heads(self.heads, self.kv_heads, heads)
        return replace(self.exchanging(heads), heads=self.heads // heads, kv_heads=split.kv_heads_of_rank)


@dataclass(frozen=True, eq=False)
class Cost:
    """Cost of one layer's attention. Arrays are [cp, cp], rank by hop; FLOPs are float64, bytes int64.

    Forward FLOPs count two matrix products over the allowed pairs, backward FLOPs five. `bytes_in` and `bytes_out` are the
    keys and values of the forward pass; the backward pass moves them again, beside the gradients. `memory` names every
    buffer and its bytes on the rank where it is largest. `decode_flops` are those of the codec, beside attention: (forward,
    backward).
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
    arriving = report.keys_in.astype(np.float64) * sizes.batch
    decode_forward, decode_backward = sizes.codec.decode_flops(sizes.kv_heads, sizes.latent)
    return Cost(
        forward_flops=work * 2 * (sizes.query_width + sizes.out_width),
        backward_flops=work * 2 * (3 * sizes.query_width + 2 * sizes.out_width),
        bytes_in=report.keys_in * keys,
        bytes_out=report.keys_out * keys,
        gradient_bytes_in=report.grads_in * gradients,
        gradient_bytes_out=report.grads_out * gradients,
        memory=memory(report, sizes, num_slots),
        decode_flops=(arriving * decode_forward, arriving * decode_backward),
    )


def memory(report: Report, sizes: AttentionSizes, num_slots: int = 2) -> dict[str, int]:
    """Bytes of every buffer on the rank where it is largest. Only the first two are kept from forward to backward."""
    tokens = int(report.tokens_per_rank.max())
    width, element, wire, float32 = sizes.key_width, sizes.element, sizes.wire_element, 4
    heads = sizes.batch * sizes.heads
    arriving, leaving, returning = (int(table.max(initial=0)) for table in (report.keys_in, report.grads_out, report.grads_in))
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


def _codec_memory(sizes: AttentionSizes, tokens: int, arriving: int, leaving: int) -> dict[str, int]:
    """What a codec needs beside the slots."""
    found = {
        "both: own keys and values, encoded": tokens * sizes.wire_key_bytes,
        "both: a hop's keys and values, decoded": arriving * sizes.key_width * sizes.element,
    }
    if sizes.codec.latent and sizes.latent is not None:
        weight = sizes.kv_heads * (sizes.latent.nope + sizes.latent.value) * sizes.latent.latent
        found["backward: a hop's dk, dv before the up-projection"] = leaving * sizes.key_width * sizes.element
        found["backward: gradients of latents in float32"] = tokens * sizes.wire_gradient_width * 4
        found["backward: gradient of the up-projection in float32"] = weight * 4
    return found


def kernel_calls(plan: PlanTables) -> Ints:
    """Kernel calls of each rank in forward, for a kernel that supports FULL and CAUSAL tiles, one a call: int64 [cp]."""
    return np.array([len(lower(rank_tiles(plan, rank)[0], Capabilities()).tiles) for rank in range(plan.cp)])


@dataclass(frozen=True)
class RankUpdates:
    """The updates of one rank's totals (`cp_ring.plan.updates`): of out, of dq, and of dk and dv of each hop, by its index."""

    out: tuple[Update, ...]
    dq: tuple[Update, ...]
    keys: Mapping[int, tuple[Update, ...]]


def rank_updates(rank_plan: RankPlan) -> RankUpdates:
    """What the executor runs with a kernel that supports FULL and CAUSAL tiles, one a call."""
    forward, backward = ([_calls(hop) for hop in hops] for hops in (rank_plan.hops, rank_plan.backward))
    out, dq = (
        query_updates(([part for part, _ in calls] for calls in hops), rank_plan.num_tokens) for hops in (forward, backward)
    )
    keys = gradient_updates(rank_plan.backward, [[part for _, part in calls] for calls in backward], rank_plan.num_tokens)
    return RankUpdates(out, dq, keys)


def _calls(hop: Hop) -> list[tuple[Partial, Partial]]:
    """Where the queries and the keys of a hop's kernel calls belong."""
    lowered = lower(hop.tiles, Capabilities())
    tiles = zip(lowered.tiles, hop.grad_shift[lowered.parent].tolist(), lowered.reverse.tolist(), strict=True)
    return [
        (Partial.of([(t.q0, t.q1)], reverse=reverse), Partial.of([(t.k0 + shift, t.k1 + shift)], reverse=reverse))
        for t, shift, reverse in tiles
    ]


def accumulator_bytes(updates: RankUpdates, sizes: AttentionSizes, lse_element: int = 4) -> tuple[int, int]:
    """Bytes that merges, sums, casts and zero fills of one rank read and write: (forward, backward).

    The kernel returns partial results in the dtype of the inputs, as on CUDA. `lse_element` is that of the running lse.
    """
    element, wire = sizes.element, sizes.wire_element
    lse = sum(sum(update.read) * 4 + sum(update.stored) * lse_element for update in updates.out if not update.whole)
    forward = sum(_moved(update, element, wire, element) for update in updates.out) * sizes.out_width
    backward = sum(_moved(update, element, wire, element) for update in updates.dq) * sizes.query_width
    for index, of_hop in updates.keys.items():
        backward += sum(_moved(update, element, wire, wire if index else element) for update in of_hop) * sizes.key_width
    return forward + lse * sizes.batch * sizes.heads, backward


def _moved(update: Update, part: int, wire: int, result: int) -> int:
    """Bytes of an update for each element of a token, with elements of these sizes."""
    if update.whole and part == result:
        return 0
    here, arrived = update.read
    loaded, kept, completed = update.stored
    return here * part + arrived * wire + (loaded + kept) * 4 + completed * result


def work_of_hops(costs: Cost) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """FLOPs of forward and of backward, rank by hop, decoding included."""
    decode_forward, decode_backward = costs.decode_flops
    return costs.forward_flops + decode_forward, costs.backward_flops + decode_backward


def between_nodes(plan: PlanTables, ranks_per_node: int) -> float:
    """Share of the moved keys that go from one node to another, if each `ranks_per_node` neighboring ranks share a node."""
    keys = plan.transfers
    crosses = keys.sender // ranks_per_node != keys.receiver // ranks_per_node
    total = int(keys.tokens.sum())
    return int(keys.tokens[crosses].sum()) / total if total else 0.0


class Crossing(NamedTuple):
    """Bytes that one layer moves from nodes to other nodes, of all ranks together.

    keys: keys and values in the ring, in forward and again in backward. gradients: their gradients, in backward.
    exchange: queries, keys, values and outputs that are exchanged for heads, in forward.
    """

    keys: int
    gradients: int
    exchange: int


def crossing(plan: Plan, sizes: AttentionSizes, ranks_per_node: int) -> Crossing:
    """The bytes of a plan that cross nodes, where each `ranks_per_node` neighboring ranks share one."""
    ring, heads = plan.ring, plan.ulysses
    split, sizes = split_heads(sizes.heads, sizes.kv_heads, heads), sizes.exchanging(heads)
    found = [0, 0]
    for place in range(heads):
        kv_heads = sum(len(group[place]) for group in split.repeated)
        for which, (table, bytes_per_token) in enumerate(
            zip((ring.transfers, ring.gradients), sizes.on_wire(kv_heads), strict=True)
        ):
            nodes = ((side * heads + place) // ranks_per_node for side in (table.sender, table.receiver))
            found[which] += int(table.tokens[np.not_equal(*nodes)].sum()) * bytes_per_token
    keys, gradients = found
    return Crossing(keys, gradients, _exchange_between_nodes(plan.layout, split, sizes, ranks_per_node))


class Exchanged(NamedTuple):
    """What one rank sends to another in the exchange of heads: so many tokens of so many heads, in all groups together."""

    sender: int
    receiver: int
    tokens: int
    queries: int
    keys: int


def exchanged(layout: Layout, split: HeadSplit) -> Iterator[Exchanged]:
    """The messages before attention. Those of the outputs, after it, go the other way, with as many heads as `queries`."""
    heads = [
        tuple(sum(end - start for start, end in (group[place] for group in spans)) for spans in (split.queries, split.keys))
        for place in range(split.size)
    ]
    for rank in range(layout.cp):
        first = rank - rank % split.size
        for place, other in enumerate(range(first, first + split.size)):
            if other != rank:
                yield Exchanged(rank, other, int(layout.tokens_per_rank[rank]), *heads[place])


def _exchange_between_nodes(layout: Layout, split: HeadSplit, sizes: AttentionSizes, ranks_per_node: int) -> int:
    """Bytes of the exchange of heads of one forward pass that cross nodes."""
    of_query = (sizes.query_width + sizes.out_width) // sizes.heads * sizes.element
    of_key = sizes.key_width // sizes.kv_heads * sizes.element
    return sum(
        message.tokens * (message.queries * of_query + message.keys * of_key)
        for message in exchanged(layout, split)
        if message.sender // ranks_per_node != message.receiver // ranks_per_node
    )


@dataclass(frozen=True)
class Span:
    """A computation or a transfer of a rank at a hop, from `start` to `end` in seconds."""

    rank: int
    hop: int
    start: float
    end: float


def timeline(plan: PlanTables, costs: Cost, rates: Rates = RATES, ranks_per_node: int = 1) -> tuple[list[Span], list[Span]]:
    """A prediction of the forward pass: (computations, transfers). The rank of a transfer is its receiver.

    A transfer starts when both ranks have begun the previous hop and both links, out of the sender and into the receiver,
    are free. Messages of several senders reach a rank one after the other. The computation of a hop starts when its keys
    have arrived and the previous hop is done. A message within one of the nodes of `ranks_per_node` neighboring ranks is faster.
    """
    cp = plan.cp
    done, posted, busy_out, busy_in = (np.zeros(cp) for _ in range(4))
    compute: list[Span] = []
    transfers: list[Span] = []
    live = (costs.forward_flops > 0) | (costs.bytes_in > 0) | (costs.bytes_out > 0)
    flops, _ = work_of_hops(costs)
    for hop in range(cp):
        ready = done.copy()
        for sender, receiver, size in _messages(plan, costs, hop):
            near = sender // ranks_per_node == receiver // ranks_per_node
            start = float(max(posted[sender], posted[receiver], busy_out[sender], busy_in[receiver]))
            busy_out[sender] = busy_in[receiver] = end = start + size / (rates.inside if near else rates.between)
            transfers.append(Span(receiver, hop, start, end))
            ready[receiver] = max(ready[receiver], end)
        for rank in np.flatnonzero(live[:, hop]).tolist():
            posted[rank] = ready[rank]
            done[rank] = ready[rank] + flops[rank, hop] / rates.flops
            compute.append(Span(rank, hop, float(ready[rank]), float(done[rank])))
    return compute, transfers


def _messages(plan: PlanTables, costs: Cost, hop: int) -> list[tuple[int, int, int]]:
    """(sender, receiver, bytes) of a hop, by receiver and in the order of its slot."""
    cp, mine = plan.cp, plan.transfers[np.flatnonzero(plan.transfers.hop == hop)]
    pairs, which = np.unique(mine.receiver * cp + (mine.receiver - mine.sender) % cp, return_inverse=True)
    tokens = np.bincount(which, mine.tokens).astype(np.int64)
    receiver, distance = np.divmod(pairs, cp)
    sizes = costs.bytes_in[receiver, hop] * tokens // np.bincount(receiver, tokens, cp).astype(np.int64)[receiver]
    return list(zip(((receiver - distance) % cp).tolist(), receiver.tolist(), sizes.tolist(), strict=True))
