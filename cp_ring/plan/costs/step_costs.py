"""Sizes of a GPT model, and the predicted time and memory of a training step, by item, for sizes of
all parallel dimensions.

The model of the time: pipeline stages work one microbatch after the other (1F1B), all with the same
number of layers, the last one with the output layer besides. Attention takes what
`cp_ring.plan.costs.simulate` says. Messages of tensor and expert parallelism are not hidden. Those
of gradients hide behind backward of the last microbatch, and those of weights behind forward of the
first one, where Megatron's flags ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import NamedTuple

from cp_ring.plan.costs.recurrent_costs import ChosenWay, RecurrentLayers
from cp_ring.plan.layout import Layout
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import Schedule
from cp_ring.plan.sizes.attention_sizes import DTYPE_BYTES, AttentionSizes, LatentSizes
from cp_ring.plan.sizes.device_rates import Rates


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
    """A GPT model.

    windows: each window (left, right) of the attention layers and the number of layers that have
    it. latent, query_latent: of
    multi-latent attention. gated: whether feed-forward networks have a gate (SwiGLU). loss_chunk:
    tokens whose logits are made at a time, 0 for all.
    recurrent: those of `layers` whose state runs along the sequence.
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
        linear = sum(each.count for each in self.recurrent)
        attention = (self.layers - linear) * self.attention_parameters
        # what the projections of a recurrent layer make is what its ranks may exchange
        attention += sum(x.count * self.hidden * x.sizes().exchanged for x in self.recurrent)
        if self.experts is None:
            return attention + self.layers * self._network(self.ffn)
        dense = self.layers - self.experts.layers
        shared = self._network(self.experts.shared_width) + self.hidden * self.experts.number
        return attention + dense * self._network(self.ffn) + self.experts.layers * shared

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
        elements = self.layers * (4 * self.hidden + latent) / per_rank
        dense = self.layers - (self.experts.layers if self.experts else 0)
        elements += dense * inner * self.ffn / tp
        if self.experts is not None:
            of_experts = (
                self.experts.top_k * (2 * self.hidden + inner * self.experts.width) / per_rank
            )
            elements += self.experts.layers * (of_experts + inner * self.experts.shared_width / tp)
        return elements * self.element


RESERVED_BYTES = 6 << 30
"""Assumed for CUDA, NCCL's buffers and fragmentation."""

# of a parameter: Adam reads and writes its states and the float32 weight, reads the gradient, casts
_OPTIMIZER_BYTES = 30

RECOMPUTE = ("none", "keep", "replay")
"""Nothing is recomputed; all layers, but out and lse of attention are kept; all layers with
attention, whose ring runs again.
"""


class ParallelSizes(NamedTuple):
    """Tensor, context, pipeline and data parallel size."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def name(self) -> str:
        """As texts show it."""
        return f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}"


@dataclass(frozen=True)
class TrainingSetup:
    """A model, its batches and the machines. memory: bytes of a device. spread: of attention's work
    from one batch row to another, standard deviation over mean. overlap: whether messages of
    gradients and weights are hidden. distributed: whether ranks share the states of the optimizer.
    shared_norms: whether tensor-parallel ranks share the activations of norms."""

    model: ModelSizes
    seq_length: int
    global_batch: int
    gpus: int
    ranks_per_node: int
    rates: Rates
    memory: float
    spread: float = 0.0
    overlap: bool = True
    distributed: bool = True
    shared_norms: bool = True

    def link(self, ranks: int) -> float:
        """Bytes per second of a rank in a group of so many consecutive ranks."""
        return (
            self.rates.inside
            if ranks <= self.ranks_per_node
            else self.rates.between / self.rates.ranks_per_card
        )

    def recurrent(self, sizes: ParallelSizes, micro_batch: int) -> list[ChosenWay]:
        """Of each kind of recurrent layers, for batch rows as if they were one document."""
        near = max(1, self.ranks_per_node // sizes.tp)
        layout = Layout.zigzag(self.seq_length * micro_batch, sizes.cp)
        return [each.faster(layout, sizes.tp, self.rates, near) for each in self.model.recurrent]

    def microbatches(self, sizes: ParallelSizes, micro_batch: int) -> int:
        """Microbatches of a pipeline in a step."""
        return self.global_batch // (sizes.dp * micro_batch)

    def tokens(self, sizes: ParallelSizes, micro_batch: int) -> int:
        """Tokens of a rank in a microbatch."""
        return self.seq_length * micro_batch // sizes.cp


class AttentionCost(NamedTuple):
    """Attention of all layers of a model, for one microbatch, on the slowest rank.

    schedule: the hops, as `auto` chose them. sources: the most sources of a hop. forward, both:
    seconds; exposed: what of them
    waits for messages. kept: bytes that a layer keeps for backward; kept_results: those of out and
    lse alone. slots: bytes of receive buffers. sums: bytes of the other buffers of one layer, at
    the time they are most.
    """

    shape: PlanSpec
    wire: str
    layout: str
    schedule: Schedule
    sources: int
    forward: float
    both: float
    exposed_forward: float
    exposed_both: float
    kept: int
    kept_results: int
    slots: int
    sums: int


def step_seconds(
    setup: TrainingSetup,
    sizes: ParallelSizes,
    micro_batch: int,
    recompute: str,
    attention: tuple[float, float, float, float],
) -> dict[str, float]:
    """Seconds of a step by item; their sum is the step.

    attention: of one microbatch in all layers: forward, forward with backward, and what waits of
    each.
    """
    model = setup.model
    rates = setup.rates
    tokens = setup.tokens(sizes, micro_batch)
    again = recompute != "none"
    products = rates.flops * rates.products * sizes.tp
    shared = setup.shared_norms
    layers = tokens * (
        model.token_flops / products + 2 * model.activation_bytes(sizes.tp, shared) / rates.memory
    )
    forward, both, waits, waits_both = attention
    if recompute == "replay":
        both, waits_both = both + forward, waits_both + waits
    passes = 3 if not model.loss_chunk else 4
    logits = (
        passes
        * tokens
        * (model.logit_flops / products + 6 * model.vocabulary / sizes.tp / rates.memory)
    )
    linear = setup.recurrent(sizes, micro_batch)
    of_microbatch = {
        "attention": both - waits_both,
        "attention waits for messages": waits_both,
        "other layers": 3 * layers,
        "recomputation": layers + sum(x.computed for x in linear) if again else 0.0,
        "recurrent layers": sum(3 * x.computed for x in linear),
        "recurrent layers exchange": sum(x.layers.count * x.cost.seconds for x in linear)
        * (1.5 if again else 1),
        "tensor-parallel messages": _tensor_parallel(setup, sizes, tokens) * (12 if again else 8),
        "expert-parallel messages": _expert_parallel(setup, sizes, tokens) * (6 if again else 4),
    }
    count = setup.microbatches(sizes, micro_batch)
    pp = sizes.pp
    stage = sum(of_microbatch.values()) / pp
    pipeline = (count - 1) * (stage + logits) + pp * stage + logits
    items = {name: count / pp * seconds for name, seconds in of_microbatch.items()}
    items["output layer"] = count / pp * logits
    items["pipeline waits"] = pipeline - sum(items.values()) if pp > 1 else 0.0
    items["pipeline messages"] = _pipeline(setup, sizes, tokens) * 2 * (count + pp - 1)
    items["gradients and weights"] = _gradients(setup, sizes, of_last=2 * layers / pp)
    items["optimizer"] = _optimizer(setup, sizes)
    # The slowest of dp ranks has so much more attention than the mean.
    spread = setup.spread * sqrt(2 * log(sizes.dp) / (count * micro_batch))
    items["uneven documents"] = count / pp * both * spread
    return {name: seconds for name, seconds in items.items() if seconds}


EXPOSED = ("attention waits for messages", "recurrent layers exchange",
           "tensor-parallel messages", "expert-parallel messages",
    "pipeline messages",
           "gradients and weights")  # fmt: skip
"""Items of a step that wait for messages."""


def _tensor_parallel(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> float:
    """Seconds of one gather, or one sum, of a layer's activations, in all layers."""
    volume = (sizes.tp - 1) / sizes.tp * tokens * setup.model.hidden * setup.model.element
    return setup.model.layers * volume / setup.link(sizes.tp)


def _expert_parallel(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> float:
    """Seconds in which the experts' inputs go to them, in all layers with experts."""
    experts = setup.model.experts
    if experts is None or experts.parallel == 1:
        return 0.0
    copies = tokens / sizes.tp * experts.top_k * setup.model.hidden * setup.model.element
    near = min(setup.ranks_per_node, experts.parallel)
    inside, between = (near - 1) / experts.parallel, (experts.parallel - near) / experts.parallel
    slow = between / setup.link(setup.ranks_per_node + 1)
    return experts.layers * copies * max(inside / setup.rates.inside, slow)


def _pipeline(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> float:
    """Seconds of one message from stage to stage."""
    if sizes.pp == 1:
        return 0.0
    held = sizes.tp if setup.shared_norms else 1
    return (
        tokens
        * setup.model.hidden
        * setup.model.element
        / held
        / setup.link(2 * sizes.tp * sizes.cp * sizes.dp)
    )


def parameters(setup: TrainingSetup, sizes: ParallelSizes) -> tuple[float, float]:
    """Parameters of a rank: experts' own, and all others."""
    model, experts = setup.model, setup.model.experts
    embedding = model.embedding_parameters / (1 if sizes.pp == 1 else 2)
    others = (model.other_parameters / sizes.pp + embedding) / sizes.tp
    return (model.expert_parameters / experts.parallel / sizes.pp if experts else 0.0), others


def _optimizer(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    of_experts, others = parameters(setup, sizes)
    replicas = sizes.dp * sizes.cp if setup.distributed else 1
    held = others / replicas + of_experts / (
        _expert_replicas(setup, sizes) if setup.distributed else 1
    )
    return held * _OPTIMIZER_BYTES / setup.rates.memory


def _expert_replicas(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    experts = setup.model.experts
    return setup.gpus / sizes.pp / (experts.parallel if experts else 1)


def _gradients(setup: TrainingSetup, sizes: ParallelSizes, of_last: float) -> float:
    """Seconds for gradients (float32) and weights between replicas that are not hidden. of_last:
    backward of a microbatch.
    """
    of_experts, others = parameters(setup, sizes)
    near = max(1, setup.ranks_per_node // sizes.tp)
    total = []
    for size in (4, setup.model.element):
        seconds = 0.0
        for amount, replicas, together in (
            (others, sizes.dp * sizes.cp, near),
            (of_experts, _expert_replicas(setup, sizes), 1),
        ):
            if replicas > 1:
                volume = amount * size * (replicas - 1) / replicas
                inside = volume / setup.rates.inside
                between = volume / (setup.link(setup.ranks_per_node + 1) * min(together, replicas))
                seconds += max(inside, between if replicas > together else 0.0)
        total.append(seconds)
    hidden = (of_last, of_last / 2) if setup.overlap else (0.0, 0.0)
    return sum(max(0.0, seconds - behind) for seconds, behind in zip(total, hidden, strict=True))


def step_memory(
    setup: TrainingSetup,
    sizes: ParallelSizes,
    micro_batch: int,
    recompute: str,
    attention: AttentionCost | None,
    weights: float,
) -> dict[str, float]:
    """Bytes of a rank by item, of the first stage or the last, whichever needs more.

    weights: bytes of weights, gradients and the optimizer's states. attention: None leaves its
    buffers and what it keeps out,
    so that the sum is the least that any shape needs.
    """
    model = setup.model
    tokens = setup.tokens(sizes, micro_batch)
    layers = model.layers / sizes.pp
    kept, results, slots, sums = (
        (attention.kept, attention.kept_results, attention.slots, attention.sums)
        if attention
        else (0, 0, 0, 0)
    )
    of_layers = tokens * model.activation_bytes(sizes.tp, setup.shared_norms) / sizes.pp
    states = [(x.layers.count, x.cost.memory) for x in setup.recurrent(sizes, micro_batch)]
    attending = layers * (1 - sum(count for count, _ in states) / model.layers)
    if recompute == "none":
        of_layers += sum(count * memory for count, memory in states) / sizes.pp
        of_microbatch, working = of_layers + attending * kept, 0.0
    else:
        inputs = tokens * model.hidden * model.element / (sizes.tp if setup.shared_norms else 1)
        of_microbatch = layers * inputs + attending * (results if recompute == "keep" else 0)
        working = of_layers / layers + max([kept, *(memory for _, memory in states)])
    chunk = min(model.loss_chunk or tokens, tokens)
    logits = chunk * model.vocabulary / sizes.tp * (model.element + 4)
    flying = min(setup.microbatches(sizes, micro_batch), sizes.pp)
    first = flying * of_microbatch > of_microbatch + logits and sizes.pp > 1
    items = {
        "weights, gradients, optimizer": weights,
        "activations": of_microbatch * (flying if first else 1) + working,
        "logits": 0.0 if first else logits,
        "attention: receive buffers": float(slots),
        "attention: sums and gradients": float(sums),
        "CUDA, NCCL, fragmentation": float(RESERVED_BYTES),
    }
    return items
