"""The model of `cp-ring tune`: the sizes of a GPT model by Megatron's arguments, and the
predicted time and memory of a training step, by item, for sizes of all parallel dimensions.

The model of the time: pipeline stages work one microbatch after the other (1F1B), all with the same
number of layers, the last one with the output layer besides. Attention takes what
`cp_ring.plan.time` says. Messages of tensor and expert parallelism are not hidden. Those of
gradients hide behind backward of the last microbatch, and those of weights behind forward of the
first one, where Megatron's flags ask for it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.adapter.asked import Asked
from cp_ring.megatron.adapter.attention_sizes import attention_sizes
from cp_ring.megatron.flags.layer_pattern import (
    expert_layers,
    letters_of,
    main_layers,
    pattern_of,
    shown_pattern,
)
from cp_ring.megatron.flags.recurrent_choice import mixers
from cp_ring.megatron.options import Options
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates, running
from cp_ring.recurrent.choice import MixerSizes

RESERVED_BYTES = 6 << 30
"""Assumed for CUDA, NCCL's buffers and fragmentation."""

# of a parameter: Adam reads and writes its states and the float32 weight, reads the gradient, casts
_OPTIMIZER_BYTES = 30

RECOMPUTE = ("none", "keep", "replay")
"""Nothing is recomputed; all layers, but out and lse of attention are kept; all layers with
attention, whose ring runs again.
"""


_KNOWN = "*GM-E"
"""Letters of layers in patterns."""


class Experts(NamedTuple):
    """The experts of a model: how many each of `layers` layers has, the `top_k` that a token takes,
    their widths, and their parallel size. By default there are none.
    """

    number: int = 0
    layers: int = 0
    top_k: int = 0
    width: int = 0
    shared_width: int = 0
    parallel: int = 1


NO_EXPERTS = Experts()


@dataclass(frozen=True)
class ModelSizes:
    """A GPT or hybrid model, whose layers have attention or a recurrence, and a feed-forward
    network or experts; those of a hybrid pattern have one of these each.

    networks: feed-forward networks, and layers with experts. layer: the attention of a layer.
    windows: each window (left, right) of the attention layers and the number of layers that have
    it. recurrent: the same of recurrent layers. shared: how ranks share them: heads, states or
    auto. query_latent: of multi-latent attention. gated: whether feed-forward networks have a gate
    (SwiGLU, quick GeGLU). output_gate: whether attention's output has one. loss_chunk: tokens whose
    logits are made at a time, 0 for all.
    """

    layers: int
    networks: int
    hidden: int
    ffn: int
    vocabulary: int
    layer: AttentionSizes
    windows: tuple[tuple[tuple[int, int], int], ...]
    query_latent: int = 0
    gated: bool = True
    output_gate: bool = False
    tied: bool = False
    experts: Experts = NO_EXPERTS
    loss_chunk: int = 0
    recurrent: tuple[tuple[MixerSizes, int], ...] = ()
    shared: str = "auto"

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return sum(count for _, count in self.windows)

    @property
    def parts(self) -> int:
        """Parts with a norm before them: attention, recurrences, networks."""
        return self.attention_layers + sum(count for _, count in self.recurrent) + self.networks

    @property
    def channels(self) -> int:
        """Channels of a token that enter and leave the scans of all recurrent layers."""
        return sum(count * sizes.channels for sizes, count in self.recurrent)

    @property
    def dense(self) -> int:
        """Feed-forward networks without experts."""
        return self.networks - self.experts.layers

    def attention(self, tp: int, batch: int, wire: str = "plain") -> AttentionSizes:
        """The attention of one layer on a tensor-parallel rank."""
        heads, groups = self.layer.heads // tp, max(self.layer.kv_heads // tp, 1)
        return replace(self.layer, heads=heads, kv_heads=groups, batch=batch, wire=wire)

    @property
    def element(self) -> int:
        """Bytes of an element of weights and activations."""
        return self.layer.element

    @property
    def attention_parameters(self) -> int:
        """Parameters of the projections of one attention layer."""
        layer, down = self.attention(1, 1), self.layer.latent
        queries, values = layer.query_width, layer.out_width
        if down is None:
            gates = queries * self.output_gate
            return self.hidden * (queries + gates + layer.key_width + values)
        of_queries = self.hidden * queries
        if self.query_latent:
            of_queries = self.query_latent * (self.hidden + queries)
        of_keys = self.hidden * (down.latent + down.rope) + layer.heads * down.decoded
        return of_queries + of_keys + self.hidden * values

    def _network(self, width: int) -> int:
        """Parameters of a feed-forward network."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers, without those that every token takes."""
        return self.experts.layers * self.experts.number * self._network(self.experts.width)

    @property
    def other_parameters(self) -> int:
        """Parameters of all layers that are no experts' own; norms and biases are left out."""
        others = self.attention_layers * self.attention_parameters + self.hidden * self.channels
        others += self.dense * self._network(self.ffn)
        shared = self._network(self.experts.shared_width) + self.hidden * self.experts.number
        return others + self.experts.layers * shared

    def embedding_parameters(self, pp: int) -> int:
        """Parameters of the embedding, and of the output layer where it has its own, on a rank of
        `pp` pipeline stages.
        """
        return (1 if self.tied or pp > 1 else 2) * self.hidden * self.vocabulary

    @property
    def token_flops(self) -> float:
        """FLOP of forward of all layers for a token, without attention's scores and without the
        output layer.
        """
        experts = self.experts.layers * self.experts.top_k * self._network(self.experts.width)
        return 2.0 * (self.other_parameters + experts)

    def activation_bytes(self, tp: int, shared: bool) -> float:
        """Bytes of a token that all layers keep for backward on a rank, where nothing is
        recomputed.

        Those that attention keeps (q, k, v, out, lse) are not among them. shared: whether
        tensor-parallel ranks share the activations of norms (sequence parallelism). The input and
        the output of each norm are kept, the channels of recurrent layers before and after their
        convolution, the input of the gate and of the last product of a feed-forward network, and
        the inputs of experts.
        """
        per_rank = tp if shared else 1
        down = self.layer.latent
        latent = down.latent + down.rope + self.query_latent if down else 0
        elements = (2 * self.parts * self.hidden + self.attention_layers * latent) / per_rank
        elements += 2 * self.channels / tp
        elements += 2 * self.hidden * self.experts.layers * self.experts.top_k / per_rank
        elements += self._inner * sum(n * width for n, width in self._widths(tp, shared))
        return elements * self.element

    @property
    def _inner(self) -> int:
        """Tensors that are as wide as a feed-forward network inside, among those that it keeps."""
        return 3 if self.gated else 2

    def _widths(self, tp: int, shared: bool) -> list[tuple[int, float]]:
        """How many layers have a kind of feed-forward network, and what a token has of its width on
        a rank, with all of its experts.
        """
        experts, per_rank = self.experts, tp if shared else 1
        of_experts = experts.top_k * experts.width / per_rank + experts.shared_width / tp
        return [x for x in ((self.dense, self.ffn / tp), (experts.layers, of_experts)) if x[0]]

    def backward_bytes(self, tp: int, shared: bool) -> tuple[float, float]:
        """Bytes of a token on a rank in backward of a layer: those that its network needs beside
        what layers keep, the gradients of its output, of its last product and of what enters that,
        less the product; and those of the network that are gone when attention begins.
        """
        widths = [width for _, width in self._widths(tp, shared)]
        needed = self.hidden * max(1, self.experts.top_k) + (self._inner - 1) * max(widths)
        return needed * self.element, self._inner * min(widths) * self.element


def model_sizes(
    args: argparse.Namespace, windows: tuple[tuple[tuple[int, int], int], ...], vocabulary: int
) -> ModelSizes:
    """Return the sizes of the model of parsed arguments, which Megatron has not completed yet.

    Raises `ConfigError` for a model of which times are not known.
    """
    letters, pattern = main_layers(letters_of(args)), pattern_of(args)
    unknown = {*letters} - {*_KNOWN} or (letters and not windows)
    if unknown or getattr(args, "heterogeneous_layers_config_path", None):
        shown = shown_pattern(args) or "--heterogeneous-layers-config-path"
        raise ConfigError(
            "cp-ring tune knows layers of attention, gated delta net, Mamba, feed-forward networks "
            f"and experts ({' '.join(_KNOWN)}), one of attention at least: leave out {shown}"
        )
    try:
        layer = attention_sizes(args)
    except PlanError as error:
        raise ConfigError(str(error)) from None
    ffn = args.ffn_hidden_size or (
        int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    )
    experts = NO_EXPERTS
    if args.num_experts:
        experts = Experts(
            number=args.num_experts,
            layers=pattern.count("E") if pattern else sum(expert_layers(args)),
            top_k=args.moe_router_topk,
            width=args.moe_ffn_hidden_size or ffn,
            shared_width=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
            parallel=args.expert_model_parallel_size,
        )
    layers = len(letters) or args.num_layers
    return ModelSizes(
        layers=layers,
        networks=letters.count("-") + letters.count("E") if pattern else layers,
        hidden=args.hidden_size,
        ffn=ffn,
        vocabulary=vocabulary,
        layer=layer,
        windows=windows,
        query_latent=(getattr(args, "q_lora_rank", None) or 0) if layer.latent else 0,
        gated=bool(args.swiglu or getattr(args, "quick_geglu", False)),
        output_gate=bool(getattr(args, "attention_output_gate", False)),
        tied=not args.untie_embeddings_and_output_weights,
        experts=experts,
        loss_chunk=Options.from_args(args).loss_chunk,
        recurrent=tuple((sizes, letters.count(letter)) for letter, sizes in mixers(Asked(args))),
        shared=Options.from_args(args).recurrent,
    )


class ParallelSizes(NamedTuple):
    """Tensor, context, pipeline and data parallel size."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def name(self) -> str:
        """The sizes as texts show them."""
        return f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}"


@dataclass(frozen=True)
class Request:
    """The search that is asked for.

    memory: bytes of a device. lengths: the documents of a batch row, as `--lengths` describes them;
    None for the job's own. tp, cp, pp: sizes that are given; None is searched.
    """

    gpus: int
    ranks_per_node: int = 8
    memory: float = 80e9
    lengths: str | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSetup(Request):
    """A model and its batches, on the machines of a request.

    micro_batch: batch rows of a microbatch. layout: which rank holds which tokens, by name.
    overlap: whether messages of gradients and weights are hidden. distributed: whether ranks share
    the states of the optimizer. shared_norms: whether tensor-parallel ranks share the activations
    of norms.
    """

    model: ModelSizes
    seq_length: int
    global_batch: int
    micro_batch: int = 1
    layout: str = "zigzag"
    overlap: bool = True
    distributed: bool = True
    shared_norms: bool = True
    rates: Rates = field(default_factory=running)

    def link(self, ranks: int) -> float:
        """Return the bytes per second of a rank in a group of `ranks` consecutive ranks."""
        return self.rates.inside if ranks <= self.ranks_per_node else self.rates.between

    def microbatches(self, sizes: ParallelSizes) -> int:
        """Return the number of microbatches of a pipeline in a step."""
        return self.global_batch // (sizes.dp * self.micro_batch)

    def tokens(self, sizes: ParallelSizes) -> int:
        """Return the tokens of a rank in a microbatch."""
        return self.seq_length * self.micro_batch // sizes.cp

    def stream_bytes(self, sizes: ParallelSizes) -> float:
        """Return the bytes of a microbatch on a rank between two layers."""
        held = sizes.tp if self.shared_norms else 1
        return self.tokens(sizes) * self.model.hidden * self.model.element / held


class AttentionCost(NamedTuple):
    """Attention of all layers of a model, for one microbatch, on the slowest rank.

    heads: neighboring ranks that exchange heads. seconds: forward, forward with backward, and what
    waits of each. kept: bytes that a layer keeps for backward; kept_results: those of out and lse
    alone. buffers: bytes of all others, of one layer, at the time they are most.
    """

    heads: int = 1
    wire: str = "plain"
    seconds: tuple[float, ...] = ()
    kept: int = 0
    kept_results: int = 0
    buffers: int = 0


NO_ATTENTION = AttentionCost()


def step_seconds(
    setup: TrainingSetup,
    sizes: ParallelSizes,
    recompute: str,
    attention: tuple[float, ...],
) -> dict[str, float]:
    """Return the seconds of a step by item; their sum is the step. Items that wait for messages
    have that word in their names.

    attention: of one microbatch in all layers: forward, forward with backward, and what waits of
    each.
    """
    model = setup.model
    rates = setup.rates
    tokens = setup.tokens(sizes)
    again = recompute != "none"
    products = rates.products * sizes.tp
    shared = setup.shared_norms
    layers = tokens * (
        model.token_flops / products + 2 * model.activation_bytes(sizes.tp, shared) / rates.memory
    )
    recurrent, exchanges = _recurrent(setup, sizes, tokens)
    forward, both, waits, waits_both = attention
    if recompute == "replay":
        both, waits_both = both + forward, waits_both + waits
    passes = 3 if not model.loss_chunk else 4
    logits = (
        passes
        * tokens
        * model.vocabulary
        * (2 * model.hidden / products + 6 / sizes.tp / rates.memory)
    )
    of_microbatch = {
        "attention": both - waits_both,
        "attention waits": waits_both,
        "recurrent layers": recurrent * (4 if again else 3),
        "recurrent messages": exchanges * (1.5 if again else 1),
        "other layers": 3 * layers,
        "recomputation": layers if again else 0.0,
        "tensor-parallel messages": _tensor_parallel(setup, sizes, tokens) * (6 if again else 4),
        "expert-parallel messages": _expert_parallel(setup, sizes, tokens) * (6 if again else 4),
    }
    count = setup.microbatches(sizes)
    pp = sizes.pp
    stage = sum(of_microbatch.values()) / pp
    pipeline = (count - 1) * (stage + logits) + pp * stage + logits
    items = {name: count / pp * seconds for name, seconds in of_microbatch.items()}
    items["output layer"] = count / pp * logits
    items["pipeline waits"] = pipeline - sum(items.values()) if pp > 1 else 0.0
    stage_link = setup.link(2 * sizes.tp * sizes.cp * sizes.dp)
    message = setup.stream_bytes(sizes) / stage_link if pp > 1 else 0.0
    items["pipeline messages"] = message * 2 * (count + pp - 1)
    items["messages of gradients and weights"] = _gradients(setup, sizes, of_last=2 * layers / pp)
    items["optimizer"] = _optimized(setup, sizes) * _OPTIMIZER_BYTES / rates.memory
    return {name: seconds for name, seconds in items.items() if seconds}


def _recurrent(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> tuple[float, float]:
    """Return the seconds of the scans of all recurrent layers in forward, and those that sharing
    them takes in forward and backward: messages, and the second pass of states.
    """
    scans = exchanges = 0.0
    near = setup.ranks_per_node // sizes.tp or 1
    for each, count in setup.model.recurrent:
        mixer = each.of_rank(sizes.tp)
        heads, states = mixer.seconds(tokens, sizes.cp, near)
        ways = {"heads": heads, "states": states}
        shared = (
            states if mixer.units % sizes.cp else ways.get(setup.model.shared, min(heads, states))
        )
        scans += count * mixer.scan_seconds(tokens, setup.rates)
        exchanges += count * shared if sizes.cp > 1 else 0.0
    return scans, exchanges


def _tensor_parallel(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> float:
    """Return the seconds of one gather, or one sum, of activations, for each part of all layers."""
    volume = (sizes.tp - 1) / sizes.tp * tokens * setup.model.hidden * setup.model.element
    return setup.model.parts * volume / setup.link(sizes.tp)


def _expert_parallel(setup: TrainingSetup, sizes: ParallelSizes, tokens: int) -> float:
    """Return the seconds in which the experts' inputs go to them, in all layers with experts."""
    experts = setup.model.experts
    if experts.parallel == 1:
        return 0.0
    copies = tokens / sizes.tp * experts.top_k * setup.model.hidden * setup.model.element
    near = min(setup.ranks_per_node, experts.parallel)
    inside, between = (near - 1) / experts.parallel, (experts.parallel - near) / experts.parallel
    slow = between / setup.link(setup.ranks_per_node + 1)
    return experts.layers * copies * max(inside / setup.rates.inside, slow)


def parameters(setup: TrainingSetup, sizes: ParallelSizes) -> tuple[float, float]:
    """Return the parameters of a rank: those of experts, and all others."""
    model, experts = setup.model, setup.model.experts
    embedding = model.embedding_parameters(sizes.pp)
    others = (model.other_parameters / sizes.pp + embedding) / sizes.tp
    return model.expert_parameters / experts.parallel / sizes.pp, others


def _optimized(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    """Return the number of parameters whose optimizer states a rank holds."""
    of_experts, others = parameters(setup, sizes)
    if not setup.distributed:
        return of_experts + others
    return others / (sizes.dp * sizes.cp) + of_experts / _expert_replicas(setup, sizes)


def weight_bytes(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    """Return the bytes of a rank's weights in 16 bits, gradients, and the optimizer's states in
    float32.
    """
    return 6 * sum(parameters(setup, sizes)) + 12 * _optimized(setup, sizes)


def _expert_replicas(setup: TrainingSetup, sizes: ParallelSizes) -> float:
    return setup.gpus / sizes.pp / setup.model.experts.parallel


def _gradients(setup: TrainingSetup, sizes: ParallelSizes, of_last: float) -> float:
    """Return the seconds of messages of gradients (float32) and weights between replicas that are
    not hidden. of_last: the backward of a microbatch, which hides them.
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
    recompute: str,
    attention: AttentionCost = NO_ATTENTION,
) -> dict[str, float]:
    """Return the bytes of a rank by item, of the first stage or the last, whichever needs more.
    Without `attention` its buffers and what it keeps are left out, so that the sum is the least
    that is needed.
    """
    model = setup.model
    tokens = setup.tokens(sizes)
    attending = model.attention_layers / sizes.pp
    of_layers = tokens * model.activation_bytes(sizes.tp, setup.shared_norms) / sizes.pp
    if recompute == "none":
        of_microbatch, working = of_layers + attending * attention.kept, 0.0
    else:
        of_microbatch = model.layers / sizes.pp * setup.stream_bytes(sizes)
        of_microbatch += attending * (attention.kept_results if recompute == "keep" else 0)
        working = of_layers * sizes.pp / model.layers + attention.kept
    network, gone = (tokens * x for x in model.backward_bytes(sizes.tp, setup.shared_norms))
    chunk = min(model.loss_chunk or tokens, tokens)
    logits = chunk * model.vocabulary / sizes.tp * (model.element + 4)
    flying = min(setup.microbatches(sizes), sizes.pp)
    first = flying * of_microbatch > of_microbatch + logits and sizes.pp > 1
    return {
        "weights, gradients, optimizer": weight_bytes(setup, sizes),
        "activations": of_microbatch * (flying if first else 1) + working,
        "logits": 0.0 if first else logits,
        "backward of a layer": max(network, attention.buffers - gone),
        "CUDA, NCCL, fragmentation": float(RESERVED_BYTES),
    }
