"""What recurrent layers exchange under context parallelism, in both ways: tokens for heads, as
Megatron does, and states. Bytes, memory and predicted time of one layer.

Work that both ways have in common is left out of the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cp_ring.plan.exchange.chains import Chains
from cp_ring.plan.layout import Layout
from cp_ring.plan.sizes.attention_sizes import DTYPE_BYTES
from cp_ring.plan.sizes.device_rates import Rates

_CHUNK = 64  # tokens that kernels scan at a time
_STATE_BYTES = 4  # of an element: states are float32


@dataclass(frozen=True)
class RecurrentSizes:
    """A layer whose state runs along the sequence, on a tensor-parallel rank.

    state: heads, and a head's channels of keys and of values: what passes from rank to rank.
    columns: channels of A, by which a map is wider than a state. shared: heads that must divide
    among ranks that exchange tokens for heads. convolved: channels of the convolution over `width`
    tokens. exchanged: channels of a token that are exchanged for heads, and back. kept: channels
    of a token that are kept for backward in both ways. again: columns of values that states compute
    beside those of the layer.
    """

    kind: str
    state: tuple[int, int, int]
    columns: int
    shared: int
    convolved: int
    width: int
    exchanged: int
    kept: int
    again: int
    dtype: str

    @classmethod
    def from_megatron(cls, source: Any, kind: str, tp: int = 1) -> RecurrentSizes:
        """A layer of the kind mamba or gdn, on one of `tp` tensor-parallel ranks.

        `source` are Megatron's arguments, or settings by their names; what they lack has Megatron's
        default.
        """
        settings: Mapping[str, Any] = source if isinstance(source, Mapping) else vars(source)

        def size(name: str, default: int) -> int:
            return int(settings.get(name) or default)

        dtype = "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "fp32"
        if kind == "mamba":
            p, s = size("mamba_head_dim", 64), size("mamba_state_dim", 128)
            groups = size("mamba_num_groups", 8) // tp
            heads = size("mamba_num_heads", 2 * size("hidden_size", p) // p) // tp
            inner, convolved = heads * p, heads * p + 2 * groups * s
            exchanged = 2 * inner + convolved + heads
            # what enters the kernel, which computes the rest again, and what leaves it
            sizes = 0, heads, convolved, 4, exchanged, exchanged, p
            return cls(kind, (heads, s, p), *sizes, dtype)
        k, v = size("linear_key_head_dim", 128), size("linear_value_head_dim", 128)
        keys = size("linear_num_key_heads", 16) // tp
        heads = size("linear_num_value_heads", 32) // tp
        convolved, width = 2 * keys * k + heads * v, size("linear_conv_kernel_dim", 4)
        exchanged = convolved + 2 * heads * v + 2 * heads
        # the convolution's outputs and the norm's inputs besides
        sizes = k, keys, convolved, width, exchanged, exchanged + convolved + heads * v, k
        return cls(kind, (heads, k, v), *sizes, dtype)

    @property
    def token_flops(self) -> float:
        """FLOP of forward for a token: the state, and a chunk of tokens that see each other."""
        heads, k, v = self.state
        return heads * (4.0 * k * v + _CHUNK * (5 * k + 3 * v))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all heads."""
        heads, k, v = self.state
        return heads * k * v * _STATE_BYTES

    @property
    def map_bytes(self) -> int:
        """Bytes of the maps of all heads: B, and A. Of Mamba, A is a number."""
        heads, k, _ = self.state
        return self.state_bytes + heads * (k * self.columns or 1) * _STATE_BYTES


@dataclass(frozen=True)
class RecurrentCost:
    """One way of one layer. bytes: all that ranks send, forward and backward. seconds: in which
    they travel, and of work that the other way lacks, forward and backward. memory: bytes of a rank
    for states and maps, and for what is kept for backward beside the other way's.
    """

    bytes: int
    seconds: float
    memory: int


def heads_cost(
    sizes: RecurrentSizes, tokens: int, cp: int, rates: Rates, near: int
) -> RecurrentCost:
    """Tokens for heads. tokens: of all ranks. near: neighboring ranks of a node."""
    element = DTYPE_BYTES[sizes.dtype]
    rank = tokens / cp * sizes.exchanged * element
    near = min(near, cp)
    moving = max(
        rank * (near - 1) / cp / rates.inside,
        rank * (cp - near) / cp * rates.ranks_per_card / rates.between,
    )
    return RecurrentCost(round(2 * rank * (cp - 1)), 2 * (2 * rates.call + moving), 0)


def states_cost(sizes: RecurrentSizes, chains: Chains, rates: Rates, near: int) -> RecurrentCost:
    """States, in the way that `Chains` takes. near: neighboring ranks of a node."""
    state, whole, (heads, k, _) = sizes.state_bytes, sizes.map_bytes, sizes.state
    element = DTYPE_BYTES[sizes.dtype]
    way = chains.way(state, whole, rates, near)
    halo = chains.halo_tokens(sizes.width) * sizes.convolved * element
    # tokens that share a document with those of another rank, of the rank with most of them
    shared = np.diff(chains.edges) * (chains.waves < 2)
    most = float(np.bincount(chains.owner, shared, chains.layout.cp).max())
    wide = most * heads * sizes.again
    flops = 2 * wide * (2 * k + _CHUNK)
    moved = 3 * wide * element / rates.memory
    work = 3 * (flops / rates.flops + moved)
    held = np.bincount(chains.owner[chains.depth > 0], minlength=chains.layout.cp).max(initial=0)
    table = len(chains.owner) if way == "gather" else int(held)
    return RecurrentCost(
        chains.bytes(state, whole, way) + 2 * halo,
        2 * chains.seconds(state, whole, rates, near)[way] + work,
        int(held * state + table * whole + (2 * wide * element if sizes.columns else 0)),
    )


def both_ways(
    sizes: RecurrentSizes, chains: Chains, rates: Rates, near: int
) -> dict[str, RecurrentCost]:
    """The cost of each way that is possible, the faster one first: heads must divide among the
    ranks.
    """
    cp = chains.layout.cp
    ways = {"states": states_cost(sizes, chains, rates, near)}
    if sizes.shared % cp == 0:
        ways["heads"] = heads_cost(sizes, chains.layout.n, cp, rates, near)
    return dict(sorted(ways.items(), key=lambda way: way[1].seconds))


@dataclass(frozen=True)
class RecurrentLayers:
    """`count` layers of one kind in a model. settings: sizes under Megatron's names, which differ
    from its defaults.
    """

    kind: str
    count: int
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of_model(cls, source: Any, letters: str) -> tuple[RecurrentLayers, ...]:
        """Those of a model with these letters, by Megatron's arguments or settings."""
        values: Mapping[str, Any] = source if isinstance(source, Mapping) else vars(source)
        names = (
            "bf16", "fp16", "hidden_size", "linear_conv_kernel_dim",
            *(f"mamba_{name}" for name in ("head_dim", "state_dim", "num_groups", "num_heads")),
            *(f"linear_{name}_head_dim" for name in ("key", "value")),
            *(f"linear_num_{name}_heads" for name in ("key", "value")),
        )  # fmt: skip
        settings = tuple((name, values[name]) for name in names if values.get(name) is not None)
        kinds = {"mamba": letters.count("M"), "gdn": letters.count("G")}
        return tuple(cls(kind, count, settings) for kind, count in kinds.items() if count)

    def sizes(self, tp: int = 1) -> RecurrentSizes:
        """Of one layer, on a tensor-parallel rank."""
        return RecurrentSizes.from_megatron(dict(self.settings), self.kind, tp)

    def faster(self, layout: Layout, tp: int, rates: Rates, near: int) -> ChosenWay:
        """The faster way, with one document in the tokens of `layout`."""
        sizes, cp = self.sizes(tp), layout.cp
        computed = self.count * layout.n / cp * sizes.token_flops / rates.flops
        kept = layout.n / cp * sizes.kept * DTYPE_BYTES[sizes.dtype]
        if cp == 1:
            return ChosenWay(self, "heads", computed, RecurrentCost(0, 0.0, 0), kept)
        chains = Chains.build(layout, np.zeros(1, np.int64))
        way, cost = next(iter(both_ways(sizes, chains, rates, near).items()))
        return ChosenWay(self, way, computed, cost, kept)


class ChosenWay(NamedTuple):
    """The way of some layers, the seconds that all of them compute in forward, the cost of one of
    them, and the bytes that this one keeps for backward in both ways.
    """

    layers: RecurrentLayers
    way: str
    computed: float
    cost: RecurrentCost
    kept: float
