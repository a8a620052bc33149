"""The predicted time and memory of a training step of a GPT or hybrid model, by item, for sizes of
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

from cp_ring.plan.costs.model_sizes import ModelSizes
from cp_ring.plan.costs.recurrent_costs import ChosenWay
from cp_ring.plan.layout import Layout
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.schedule import Schedule
from cp_ring.plan.sizes.device_rates import Rates

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
        "tensor-parallel messages": _tensor_parallel(setup, sizes, tokens) * (6 if again else 4),
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
    """Seconds of one gather, or one sum, of the activations of all parts."""
    volume = (sizes.tp - 1) / sizes.tp * tokens * setup.model.hidden * setup.model.element
    return setup.model.parts * volume / setup.link(sizes.tp)


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
    return _optimized(setup, sizes) * _OPTIMIZER_BYTES / setup.rates.memory


def _optimized(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    """Parameters whose optimizer states a rank holds."""
    of_experts, others = parameters(setup, sizes)
    if not setup.distributed:
        return of_experts + others
    return others / (sizes.dp * sizes.cp) + of_experts / _expert_replicas(setup, sizes)


def weight_bytes(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    """Bytes of a rank's weights in 16 bits, gradients, and the optimizer's states in float32."""
    return 6 * sum(parameters(setup, sizes)) + 12 * _optimized(setup, sizes)


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
    linear = setup.recurrent(sizes, micro_batch)
    states = [(x.layers.count, x.cost.memory + x.kept) for x in linear]
    attending = model.attending / sizes.pp
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
