"""Sizes of a GPT or hybrid model: its layers, parameters, and what a token costs in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cp_ring.plan.costs.recurrent_costs import RecurrentLayers
from cp_ring.plan.sizes.attention_sizes import DTYPE_BYTES, AttentionSizes, LatentSizes


class Experts(NamedTuple):
    """Experts of a model: so many in each of `layers` layers, of which a token takes `top_k`;
    widths; parallel size.
    """

    number: int
    layers: int
    top_k: int
    width: int
    shared_width: int = 0
    parallel: int = 1


@dataclass(frozen=True)
class ModelSizes:
    """A GPT model, or a hybrid one, whose layers are one part each: attention, a feed-forward
    network, experts, or a recurrence.

    windows: each window (left, right) of the attention layers and the number of layers that have
    it. latent, query_latent: of
    multi-latent attention. gated: whether feed-forward networks have a gate (SwiGLU). loss_chunk:
    tokens whose logits are made at a time, 0 for all.
    recurrent: those of `layers` whose state runs along the sequence. networks: dense feed-forward
    networks of a hybrid model; by default one in each layer without experts.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocabulary: int
    windows: tuple[tuple[tuple[int, int], int], ...]
    latent: LatentSizes | None = None
    query_latent: int = 0
    gated: bool = True
    tied: bool = False
    dtype: str = "bf16"
    experts: Experts | None = None
    loss_chunk: int = 0
    recurrent: tuple[RecurrentLayers, ...] = ()
    networks: int | None = None

    @property
    def attending(self) -> int:
        """Layers of attention."""
        return sum(count for _, count in self.windows)

    @property
    def dense(self) -> int:
        """Feed-forward networks without experts."""
        if self.networks is not None:
            return self.networks
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def parts(self) -> int:
        """Attention, recurrences and feed-forward networks, each with a norm: a layer has two, and
        one in a hybrid model.
        """
        return self.layers * (2 if self.networks is None else 1)

    def attention(self, tp: int, batch: int, wire: str = "plain") -> AttentionSizes:
        """The attention of one layer on a tensor-parallel rank."""
        groups = max(self.kv_heads // tp, 1)
        sizes = (self.heads // tp, groups, self.head_dim, self.value_dim)
        return AttentionSizes(*sizes, dtype=self.dtype, batch=batch, wire=wire, latent=self.latent)

    @property
    def element(self) -> int:
        """Bytes of an element of weights and activations."""
        return DTYPE_BYTES[self.dtype]

    @property
    def attention_parameters(self) -> int:
        """Parameters of the projections of one attention layer."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        if self.latent is None:
            return self.hidden * (
                queries + self.kv_heads * (self.head_dim + self.value_dim) + values
            )
        down, width = self.latent, self.heads * (self.latent.nope + self.latent.value)
        of_queries = (
            self.query_latent * (self.hidden + queries)
            if self.query_latent
            else self.hidden * queries
        )
        return (
            of_queries
            + self.hidden * (down.latent + down.rope)
            + down.latent * width
            + self.hidden * values
        )

    def _network(self, width: int) -> int:
        """Parameters of a feed-forward network."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers, without those that every token takes."""
        return (
            self.experts.layers * self.experts.number * self._network(self.experts.width)
            if self.experts
            else 0
        )

    @property
    def other_parameters(self) -> int:
        """Parameters of all layers that are no experts' own; norms and biases are left out."""
        attention = self.attending * self.attention_parameters
        # what the projections of a recurrent layer make is what its ranks may exchange
        attention += sum(x.count * self.hidden * x.sizes().exchanged for x in self.recurrent)
        others = attention + self.dense * self._network(self.ffn)
        if self.experts is None:
            return others
        shared = self._network(self.experts.shared_width) + self.hidden * self.experts.number
        return others + self.experts.layers * shared

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output layer where it has its own."""
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def token_flops(self) -> float:
        """FLOP of forward of all layers for a token, without attention's scores and without the
        output layer.
        """
        active = self.other_parameters
        if self.experts is not None:
            active += self.experts.layers * self.experts.top_k * self._network(self.experts.width)
        return 2.0 * active

    @property
    def logit_flops(self) -> float:
        """FLOP of forward of the output layer for a token."""
        return 2.0 * self.hidden * self.vocabulary

    def activation_bytes(self, tp: int, shared: bool) -> float:
        """Bytes of a token that all layers keep for backward on a rank, where nothing is
        recomputed.

        Those that attention keeps (q, k, v, out, lse) are not among them. shared: whether
        tensor-parallel ranks share the activations of norms (sequence parallelism). The input and
        the output of each norm are kept, the input of the gate and of the last product of a
        feed-forward network, and the inputs of experts.
        """
        per_rank = tp if shared else 1
        inner = 3 if self.gated else 2
        latent = self.latent.latent + self.latent.rope + self.query_latent if self.latent else 0
        elements = (2 * self.parts * self.hidden + self.attending * latent) / per_rank
        elements += self.dense * inner * self.ffn / tp
        if self.experts is not None:
            of_experts = (
                self.experts.top_k * (2 * self.hidden + inner * self.experts.width) / per_rank
            )
            elements += self.experts.layers * (of_experts + inner * self.experts.shared_width / tp)
        return elements * self.element
