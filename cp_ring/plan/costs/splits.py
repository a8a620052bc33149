"""What splits of the same documents over the same ranks cost: padding, balance, bytes, predicted
time of one layer.

All have the same model of attention, `cp_ring.plan.costs.simulate`, for the kernel that predictions
assume, which computes whole blocks of `block` x `block` pairs: a chunk of 4 tokens costs a block.
Other packages' rings make one kernel call and one merge a hop. To attention come the token-wise
layers of a rank, whose backward costs twice their forward. A step is over when its slowest rank is
done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.costs.cost import blocked_pairs, crossing
from cp_ring.plan.costs.simulate import Pass, simulate
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import Ints
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates

Floats = NDArray[np.float64]

Groups = Sequence[Sequence[Sequence[int]]]
"""Of Megatron's hybrid scheduler: for each group of microbatches and each rank, the documents that
it works on.
"""


@dataclass(frozen=True)
class Layer:
    """A layer and the machines: sizes of attention, width of the feed-forward network, ranks of a
    node, speeds.
    """

    sizes: AttentionSizes = field(default_factory=AttentionSizes)
    ffn: int = 14336
    ranks_per_node: int = 8
    rates: Rates = RATES
    block: int = 128

    @property
    def token_flops(self) -> float:
        """FLOP of forward of the token-wise layers for a token: projections of attention, and a
        gated feed-forward network.
        """
        hidden = self.sizes.heads * self.sizes.head_dim
        return 2.0 * (2 * hidden * hidden + hidden * self.sizes.key_width + 3 * hidden * self.ffn)

    @property
    def link(self) -> float:
        """Bytes per second between nodes for a rank, where all ranks that share a network card send
        at the same time.
        """
        return self.rates.between / self.rates.ranks_per_card

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return self.sizes.key_width * self.sizes.element


@dataclass(frozen=True)
class SplitCost:
    """What one way of splitting costs. Bytes are keys and values, and exchanged heads, of one
    forward pass.

    padding: tokens that are no document's. balance: maximum over mean of the attention of ranks, in
    blocks.
    bytes_in: of the rank that gets most. between_nodes: of all ranks together. forward, backward:
    seconds of one layer.
    """

    name: str
    padding: int
    balance: float
    bytes_in: int
    between_nodes: int
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


def compare(
    lengths: Ints, cp: int, layer: Layer, hybrid: Groups | None = None, group: int | None = None
) -> list[SplitCost]:
    """The splits of documents of these lengths over `cp` ranks.

    hybrid: the schedule of Megatron's hybrid context parallelism for the lengths of
    `padded(lengths, cp)`, if it is known.
    group: ranks of a context-parallel group of the smaller padded job, by default as few as hold
    the longest document.

    Raises `PlanError` if there are fewer tokens than the layouts need.
    """
    n = int(lengths.sum())
    mask = Mask.documents(np.cumsum([0, *lengths]))
    small = smallest_group(lengths, cp) if group is None else group
    if small < 1 or cp % small:
        raise PlanError(f"a group of {small} ranks does not divide the {cp} ranks")
    splits = [_padded_groups(lengths, cp, small, layer)] if small < cp else []
    splits.append(_padded_groups(lengths, cp, cp, layer))
    if hybrid is not None:
        splits.append(_hybrid(lengths, hybrid, cp, layer))
    splits.append(_per_document(lengths, cp, layer))
    zigzag = Layout.zigzag(n, cp)
    balanced = Layout.balanced(mask, cp)
    node = layer.ranks_per_node if cp % layer.ranks_per_node == 0 else 1
    splits.append(_planned("zigzag", Plan.build(mask, zigzag, node_size=node), layer))
    splits.append(_planned("balanced", Plan.build(mask, balanced, node_size=node), layer))
    weighed = Layout.balanced(mask, cp, token_work=layer.token_flops / layer.sizes.pair_flops[0])
    splits.append(_planned("balanced, weighed", Plan.build(mask, weighed, node_size=node), layer))
    if 1 < node < cp:
        relayed = Plan.build(
            mask, balanced, route="relay", slot_shards=max(4, node), node_size=node
        )
        splits.append(_planned("balanced, relay", relayed, layer))
    heads = min(node, cp)
    if heads > 1 and layer.sizes.heads % heads == 0:
        splits.append(
            _planned(f"balanced, heads {heads}", Plan.build(mask, balanced, ulysses=heads), layer)
        )
    return splits


def smallest_group(lengths: Ints, cp: int) -> int:
    """The fewest ranks, a power of two that divides `cp`, whose share of the tokens holds the
    longest document.
    """
    share = -(-int(lengths.sum()) // cp)
    size = 1
    while size * share < int(lengths.max()) and size < cp and cp % (2 * size) == 0:
        size *= 2
    return size if size * share >= int(lengths.max()) else cp


def padded(lengths: Ints, cp: int) -> Ints:
    """The lengths padded to multiples of 2 * cp, as TransformerEngine's split of packed documents
    needs them; cp 1 needs none.
    """
    unit = 2 * cp if cp > 1 else 1
    return -(-lengths // unit) * unit


def _causal_blocks(tokens: Ints, block: int) -> Ints:
    """Pairs in the blocks of causal tiles."""
    side = -(-tokens // block)
    return side * (side + 1) // 2 * block * block


@dataclass(frozen=True)
class _Ring:
    """Documents that are each split by zigzag over a ring of `ranks`: pairs of hop 0, of any other
    hop, and tokens of a rank.
    """

    ranks: int
    first: int
    other: int
    tokens: int

    @classmethod
    def of(cls, length: Ints, ranks: int, block: int) -> _Ring:
        if ranks == 1:
            return cls(1, int(_causal_blocks(length, block).sum()), 0, int(length.sum()))
        chunk = length // (2 * ranks)
        first = _causal_blocks(2 * chunk, block)
        blocks = -(-2 * chunk // block)
        other = blocks * -(-chunk // block) * block * block
        return cls(ranks, int(first.sum()), int(other.sum()), int(2 * chunk.sum()))

    @property
    def pairs(self) -> int:
        return self.first + (self.ranks - 1) * self.other


def _ring_seconds(ring: _Ring, layer: Layer) -> tuple[float, float]:
    """Forward and backward of TransformerEngine's ring: at each hop every rank passes a whole shard
    to its neighbor.
    """
    sent = np.full((1, ring.ranks), float(ring.tokens * layer.key_bytes))
    pairs = np.array([[ring.first, *[ring.other] * (ring.ranks - 1)]], np.float64)
    link = layer.link if ring.ranks > layer.ranks_per_node else layer.rates.inside
    return _with_tokens(*_hops_seconds(pairs, sent / link, ring.tokens, layer), ring.tokens, layer)


def _hops_seconds(pairs: Floats, travel: Floats, tokens: int, layer: Layer) -> tuple[float, float]:
    """Forward and backward of rings of one source a hop, of the slowest rank: pairs and seconds of
    arriving keys [ranks, hops].

    Hop 0 has the rank's own keys. Gradients travel as long as keys.
    """
    hops, (there, back) = (
        pairs.shape[1],
        (pairs * flops / layer.rates.flops for flops in layer.sizes.pair_flops),
    )
    # as the schedule `auto` has it
    merged = tokens * layer.sizes.out_width * (layer.sizes.element + 8) / layer.rates.memory
    extra = hops * layer.rates.call + (hops - 1) * merged
    none = np.zeros_like(travel[:, :1])
    keys = np.concatenate([travel[:, 1:], none], 1)
    halves = back[:, :1] / 2
    both_ways = np.concatenate([keys, none], 1) + np.concatenate([none, none, travel[:, 1:]], 1)
    forward = Pass(there, keys, extra).seconds
    backward = Pass(np.concatenate([halves, back[:, 1:], halves], 1), both_ways, extra).seconds
    slowest = int((forward + backward).argmax())
    return float(forward[slowest]), float(backward[slowest])


def _with_tokens(
    forward: float, backward: float, tokens: float, layer: Layer
) -> tuple[float, float]:
    alone = tokens * layer.token_flops / layer.rates.flops
    return forward + alone, backward + 2 * alone


def _ring_between_nodes(ring: _Ring, layer: Layer) -> int:
    """Bytes of forward that one such ring moves from node to node."""
    nodes = ring.ranks // layer.ranks_per_node
    return nodes * (ring.ranks - 1) * ring.tokens * layer.key_bytes if nodes > 1 else 0


def _padded_groups(lengths: Ints, cp: int, size: int, layer: Layer) -> SplitCost:
    """TransformerEngine's packed split: data parallel over `cp / size` groups, which get documents
    of equal tokens together.
    """
    full = padded(lengths, size)
    load = np.zeros(cp // size, np.int64)
    members: list[list[int]] = [[] for _ in range(cp // size)]
    for document in np.argsort(-full, kind="stable").tolist():
        least = int(load.argmin())
        load[least] += full[document]
        members[least].append(document)
    rings = [_Ring.of(full[documents], size, layer.block) for documents in members if documents]
    times = [_ring_seconds(ring, layer) for ring in rings]
    forward, backward = max(times, key=sum)
    pairs = np.array([ring.pairs for ring in rings] + [0] * (cp // size - len(rings)), np.float64)
    name = f"padded thd, cp {size}" + (f" x dp {cp // size}" if size < cp else "")
    sent = max((ring.ranks - 1) * ring.tokens for ring in rings) * layer.key_bytes
    between = sum(_ring_between_nodes(ring, layer) for ring in rings)
    padding = int((full - lengths).sum())
    balance = float(pairs.max() / pairs.mean())
    return SplitCost(name, padding, balance, sent, between, forward, backward)


def _hybrid(lengths: Ints, groups: Groups, cp: int, layer: Layer) -> SplitCost:
    """Megatron's hybrid context parallelism: ranks work on their documents one by one, and wait for
    one another after a group.
    """
    full = padded(lengths, cp)
    forward = backward = 0.0
    pairs = np.zeros(cp)
    received = np.zeros(cp)
    between = 0
    for of_ranks in groups:
        sizes = np.bincount(
            [document for mine in of_ranks for document in mine], minlength=len(lengths)
        )
        times = np.zeros((cp, 2))
        rings = {
            int(i): _Ring.of(full[i : i + 1], int(sizes[i]), layer.block)
            for i in np.flatnonzero(sizes)
        }
        seconds = {i: _ring_seconds(ring, layer) for i, ring in rings.items()}
        between += sum(_ring_between_nodes(ring, layer) for ring in rings.values())
        for rank, mine in enumerate(of_ranks):
            for document in mine:
                times[rank] += seconds[document]
                pairs[rank] += rings[document].pairs
                received[rank] += (
                    (rings[document].ranks - 1) * rings[document].tokens * layer.key_bytes
                )
        slowest = times[times.sum(1).argmax()]
        forward, backward = forward + float(slowest[0]), backward + float(slowest[1])
    balance = float(pairs.max() / pairs.mean())
    padding = int((full - lengths).sum())
    most = int(received.max())
    return SplitCost("hybrid", padding, balance, most, between, forward, backward)


def _per_document(lengths: Ints, cp: int, layer: Layer) -> SplitCost:
    """Each document split by zigzag over all ranks, and only the keys that a query reads travel,
    from their owner.
    """
    full = padded(lengths, cp)
    ring = _Ring.of(full, cp, layer.block)
    rank = np.arange(cp)
    # A rank reads both chunks of each later rank, and the first chunk of each earlier one. Hop t:
    # those of rank - t.
    owner = (rank[:, None] - rank) % cp
    read = (
        np.where(owner < rank[:, None], ring.tokens / 2, ring.tokens) * (rank > 0) * layer.key_bytes
    )
    far = owner // layer.ranks_per_node != rank[:, None] // layer.ranks_per_node
    pairs = np.where(
        (rank > 0) & (read == 0), 0.0, np.where(rank == 0, ring.first, ring.other)
    ) * np.ones((cp, 1))
    seconds = _hops_seconds(
        pairs, read / np.where(far, layer.link, layer.rates.inside), ring.tokens, layer
    )
    forward, backward = _with_tokens(*seconds, ring.tokens, layer)
    padding = int((full - lengths).sum())
    received = int(read.sum(1).max())
    between = int((read * far).sum())
    return SplitCost("per-document zigzag", padding, 1.0, received, between, forward, backward)


def _planned(name: str, plan: Plan, layer: Layer) -> SplitCost:
    """A plan of cp_ring."""
    rates = replace(layer.rates, block=layer.block, padded=True)
    timeline = simulate(plan, plan.verify(plan.cp), layer.sizes, rates, layer.ranks_per_node)
    tokens, ring, heads = plan.layout.tokens_per_rank, plan.ring, plan.ulysses
    times = _with_tokens(
        timeline.forward, timeline.both - timeline.forward, float(tokens.max()), layer
    )
    moved = crossing(plan, layer.sizes, layer.ranks_per_node)
    own = layer.sizes.of_rank(heads)
    received = (
        np.bincount(ring.transfers.receiver, ring.transfers.tokens, ring.cp).max()
        * own.wire_key_bytes
    )
    width = layer.sizes.query_width + layer.sizes.out_width + layer.sizes.key_width
    exchanged = int(tokens.max() * width * layer.sizes.element * (heads - 1) / heads)
    work = blocked_pairs(ring, layer.block).sum(1)
    balance = float(work.max() / work.mean())
    between = moved.keys + moved.exchange
    return SplitCost(name, 0, balance, int(received) + exchanged, between, *times)
