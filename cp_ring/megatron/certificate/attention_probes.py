"""Probes every attention layer of the job over the context-parallel group: each must be built as
the flags declare, and compute what the declared layer computes.

Layers of a kind run on the same short microbatch, and must share the plan of the job's own sequence
length. The first one is also probed at a few positions of that length, up to `LONG` tokens.

The mask: which outputs depend on a token, and which gradients depend on a query. With equal scores
everything is linear in the values, and each channel of the value heads belongs to one token. So one
call probes as many tokens as there are channels. Values: outputs and gradients for random tensors,
compared with float64.

Shapes: s tokens of this rank, m of them whose queries are compared, n tokens of a batch row, b
batch rows, h query and g key/value heads, d and e head sizes of keys and values.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter.heads_choice import every_choice
from cp_ring.megatron.certificate.batch import Batch, own_device
from cp_ring.megatron.certificate.dense_oracle import allowed_pairs, attend
from cp_ring.megatron.certificate.layer_kinds import (
    GRAIN,
    LayerKind,
    find_layer_kinds,
    masks_of,
)
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tiny_model import core_classes, transformer_config, with_changes
from cp_ring.megatron.flags.layer_pattern import config_of_layer
from cp_ring.megatron.wrapping import replaced
from cp_ring.plan.sizes.attention_sizes import WIRES

CHANNELS = 512  # most channels of values that a call needs
CALLS = 4  # where all queries are compared
# Bound of the norm of an error over the norm of the truth: three times the error of kernels that
# round partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
# factor of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
LONG = {"cpu": 2048, "cuda": 8192}  # most tokens of all these batch rows together

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ExaminedLayers:
    """Core attention layers of one `kind` by number, with their context-parallel group and dtype,
    the seed of random tensors, and the batch rows of a microbatch.

    Attributes:
        note: appended to the names of their probes.
        samples: how many queries of this rank are compared; 0 for all of them.
    """

    kind: LayerKind
    layers: Mapping[int, Any]
    group: Any
    dtype: torch.dtype
    seed: int
    batch: Batch
    note: str = ""
    samples: int = 0

    @property
    def first(self) -> Any:
        """The first layer of its kind, which alone is examined pair by pair."""
        return self.layers[self.kind.layer]

    @cached_property
    def positions(self) -> Tensor:
        """The indices in their batch rows of this rank's tokens, int64 [b, s]."""
        return self.batch.positions[self.group.rank()].to(own_device())

    @cached_property
    def sampled(self) -> Tensor:
        """The indices, int64 [m], of the compared queries among this rank's tokens."""
        s = self.positions.shape[1]
        spread = torch.linspace(0, s - 1, min(self.samples or s, s)).long()
        inner = torch.tensor([s // 2 - 1, s // 2])  # the two chunks that a rank holds meet here
        return torch.cat([spread, inner]).unique().to(own_device())

    def probe(
        self, name: str, error: float, bound: float, where: str, unit: str = "pairs"
    ) -> Probe:
        """Make the result of a probe of these layers."""
        about = name + self.note, self.kind.layer_name, self.batch.mask
        return Probe(*about, error, bound, where, unit)

    def probes(self) -> Iterator[Probe]:
        """Probe the mask of the first layer, and the values of all layers."""
        yield from self._masks()
        yield from self._values()

    def _local(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of whole batch rows: [b, n, ...] to [b, s, ...]."""
        return whole[torch.arange(len(whole))[:, None], self.positions]

    def _call(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call a layer with this rank's tokens of whole batch rows [b, n, heads, size]; return out
        [b, s, h, e].
        """
        from megatron.core.transformer.enums import AttnMaskType

        thd = self.batch.mask == "packed"
        local = [self._local(x) for x in (q, k, v)]
        given = [x[0] if thd else x.transpose(0, 1).contiguous() for x in local]
        named = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": self.batch.packed}
        out: Tensor = layer(*given, None, **named)
        return out.reshape(*self.positions.T.shape, self.kind.heads, -1).transpose(0, 1)

    def _masks(self) -> Iterator[Probe]:
        """Change one token's value, and the gradient of its query's output, and find the outputs,
        and the gradients of values, that change: in one call for each of at most `CALLS` groups of
        tokens.
        """
        kind = self.kind
        channels = min(CHANNELS, kind.groups * kind.e)
        tokens = self._chosen_tokens(channels * (1 if self.samples else CALLS))
        found: list[list[list[int]]] = [[], []]
        q, k = (self._ones(tokens[:0], heads, kind.d) for heads in (kind.heads, kind.groups))
        for picked in tokens.split(channels):
            v = self._ones(picked, kind.groups, kind.e).requires_grad_()
            with torch.enable_grad():
                out = self._call(self.first, q, k, v)
            dout = self._local(self._ones(picked, kind.heads, kind.e))
            (dv,) = torch.autograd.grad(out, v, dout)
            found[0] += self._wrong_pairs(out[:, :, :: kind.heads // kind.groups], picked, True)
            found[1] += self._wrong_pairs(self._local(dv), picked, False)
        for name, wrong in zip(("mask", "mask of gradients"), found, strict=True):
            where = ""
            for row, query, key, seen in wrong[:1]:
                sees, kind_of = ("sees", "hidden") if seen else ("does not see", "visible")
                where = f"query {query} {sees} key {key} of batch row {row}"
                where += f", which is declared {kind_of}"
            yield self.probe(name, len(wrong), 0.0, where)

    def _chosen_tokens(self, most: int) -> Tensor:
        """Return at most `most` positions to probe, int64, evenly spread and beside edges of
        chunks, documents and windows, where a mask is most likely wrong.
        """
        n, window, parts = self.batch.shape[1], self.kind.probed[0], 2 * self.group.size()
        edges = [n * i // parts for i in range(parts)]
        edges += [edge + window for edge in edges] if window >= 0 else []
        edges += [at for rule in self.batch.rules for piece in rule.pieces for at in piece[:4]]
        near = {edge + side for edge in edges for side in (-1, 0, 1)} & {*range(n)}
        chosen = sorted(near.union(range(0, n, -(-n // most))))
        return torch.tensor(chosen[:: -(-len(chosen) // most)], device=own_device())

    def _ones(self, picked: Tensor, heads: int, size: int) -> Tensor:
        """Return zeros [b, n, heads, size] of whole batch rows, with a one for each picked token,
        in its own channel of the first head that shares a key/value head.
        """
        shape = len(self.positions), self.batch.shape[1], heads, size
        x = torch.zeros(shape, dtype=self.dtype, device=own_device())
        number = torch.arange(len(picked), device=x.device)
        x[:, picked, number // size * (heads // self.kind.groups), number % size] = 1
        return x

    def _wrong_pairs(self, changed: Tensor, picked: Tensor, of_keys: bool) -> list[list[int]]:
        """Return each pair on which the layer and the declared mask disagree: batch row, query,
        key, and 1 if the layer's query sees the key.

        changed: [b, s, g, e], what each picked key adds to outputs, or what the output of each
            picked query adds to the gradients of values. `of_keys` tells which.
        """
        seen = changed.flatten(2)[..., : len(picked)] != 0
        queries, keys = self.positions, picked.expand(len(seen), -1)
        if not of_keys:
            seen, queries, keys = seen.mT, keys, queries
        wrong = seen != allowed_pairs(self.batch.rules, queries, keys, self.kind.probed)
        row, query, key = wrong.nonzero(as_tuple=True)
        found = row, queries[row, query], keys[row, key], seen[wrong].long()
        return torch.stack(found, 1).tolist()

    def _values(self) -> Iterator[Probe]:
        """Compare outputs and gradients of all layers for the same random tensors, the same on all
        ranks.
        """
        kind, sampled, sink = self.kind, self.sampled, None
        rows, n = len(self.positions), self.batch.shape[1]
        random = torch.Generator(own_device()).manual_seed(self.seed)
        sizes = {"q": (kind.heads, kind.d), "k": (kind.groups, kind.d), "v": (kind.groups, kind.e)}
        inputs = {
            name: torch.randn(rows, n, *size, generator=random, device=random.device).to(self.dtype)
            for name, size in (sizes | {"dout": (kind.heads, kind.e)}).items()
        }
        inputs["dout"] = self._local(inputs["dout"])[:, sampled]
        pairs = self.positions[:, sampled], torch.arange(n).expand(rows, -1)
        allowed = allowed_pairs(self.batch.rules, *pairs, kind.probed)
        if kind.sink != "vanilla":
            sink = self.first.softmax_offset.detach().double().requires_grad_()

        def declared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self._local(q)[:, sampled], k, v, allowed, kind.scale, sink)

        exact = {name: x.double() for name, x in inputs.items()}
        truth = self._results(declared, exact, sink)
        for number, layer in self.layers.items():

            def computed(*qkv: Tensor, layer: Any = layer) -> Tensor:
                return self._call(layer, *qkv)[:, sampled]

            found = self._results(computed, inputs, getattr(layer, "softmax_offset", None))
            for name, expected in truth.items():
                yield self._value(number, name, found[name].double(), expected)

    def _results(
        self, attention: Callable[..., Tensor], inputs: Tensors, sink: Tensor | None
    ) -> Tensors:
        """Return what `attention` of whole batch rows makes of the inputs: out and dq of the
        sampled queries [b, m, h, size], dk and dv of this rank's keys, and the gradient `dsink` [h]
        of a learnable sink. The ranks add up gradients, because each computes its own queries or
        keys.
        """
        leaves = {f"d{name}": inputs[name].detach().requires_grad_() for name in "qkv"}
        with torch.enable_grad():
            out = attention(*leaves.values())
        if sink is not None and self.kind.sink == "learnable":
            leaves["dsink"] = sink
        dout, given, found = inputs["dout"], [*leaves.values()], {"out": out.detach()}
        grads = torch.autograd.grad(out, given, dout, allow_unused=True, materialize_grads=True)
        for name, grad in zip(leaves, grads, strict=True):
            total = grad.double()
            dist.all_reduce(total, group=self.group)
            found[name] = total if name == "dsink" else self._local(total)
        return found | {"dq": found["dq"][:, self.sampled]}

    def _value(self, number: int, name: str, computed: Tensor, truth: Tensor) -> Probe:
        """Compare one of the `_results` of a layer with the truth."""
        difference = computed - truth
        bound = BOUNDS[self.dtype] + WIRES[getattr(self.first, "wire", "plain")].widening
        bound *= SINK_FACTOR if name == "dsink" else 1.0
        where = f"layer {number}"
        if computed.dim() == 4:
            worst = int(difference.abs().amax((2, 3)).nan_to_num(torch.inf).argmax())
            batch_row, token = divmod(worst, computed.shape[1])
            what, positions = "key", self.positions[batch_row]
            if name in ("out", "dq"):
                what, positions = "query", positions[self.sampled]
            where += f", worst at {what} {int(positions[token])} of batch row {batch_row}"
        error = float(difference.norm()) / (float(truth.norm()) or 1.0)
        return self.probe(name, error, bound, where)


def probe_layers(args: argparse.Namespace, results: Certificate, seed: int) -> None:
    """Probe every kind of layer of the job with each mask over the context-parallel group in force.

    Where latents travel, layers are probed with their keys and values: the tiny model has latents.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = transformer_config(args)
    used, dtype = settings.current(), args.params_dtype
    if used.wire == "latent":
        used = replace(used, wire="plain")
        if dtype != torch.float32:
            results.not_covered.append(f"latents in {str(dtype).removeprefix('torch.')}")
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp", "hcp"])
    cp = groups.cp.size()
    unit = 2 * cp * GRAIN
    kinds = [kind for kind in find_layer_kinds(args, config) if kind.numbers]
    classes = core_classes(args, config, kinds)
    with settings.in_force(used):
        for kind, mask in itertools.product(kinds, masks_of(args)):
            make = partial(_make_layers, classes[kind.layer], config, groups)
            draw = partial(Batch.draw, mask, args.micro_batch_size, cp=cp, padded=True)
            layers, batch = make(kind), draw(n=kind.tokens)
            short = ExaminedLayers(kind, layers, groups.cp, dtype, seed, batch)
            own: Any = getattr(short.first, "spec", None)  # of ring attention
            # each number of heads that a plan of ring attention may choose
            for spec in every_choice(own, cp) if own else [own]:
                one = short if spec == own else replace(short, note=f" with heads {spec.ulysses}")
                with replaced(*((layer, "spec", spec) for layer in layers.values())):
                    results.probes += one.probes()
            wide = replace(kind, probed=kind.window)
            long = short if wide == kind else replace(short, kind=wide, layers=make(wide))
            most = LONG[own_device().type] // len(short.positions) // unit * unit
            n, tokens = args.seq_length, max(kind.tokens, min(args.seq_length, most))
            if own:
                results.probes.append(_settings(replace(long, batch=draw(n=max(n, kind.tokens)))))
            if tokens > kind.tokens or wide != kind:
                first, note = {kind.layer: long.first}, f" at {tokens} tokens"
                long = replace(long, layers=first, batch=draw(n=tokens), note=note, samples=SAMPLED)
                results.probes += long.probes()
            if tokens < n:
                results.up_to[f"{kind.layer_name} under {mask}"] = f"{tokens} of {n} tokens"


def _make_layers(made: Any, config: Any, groups: Any, kind: LayerKind) -> dict[int, Any]:
    """Build the job's core attention of each layer of this kind, of the class `made`, as its
    attention layer does, with the window that `kind` probes.
    """
    from megatron.core.transformer.enums import AttnMaskType

    latent, layers = config.multi_latent_attention, {}
    sizes = {"k_channels": kind.d, "v_channels": kind.e} if latent else {}
    window = {"window_size": kind.probed, "window_attn_skip_freq": None}
    for number in kind.numbers:
        own = config_of_layer(config, number)
        layers[number] = layer = made(
            own if kind.probed == kind.window else with_changes(own, window),
            number,
            AttnMaskType.causal,
            "self",
            attention_dropout=0.0,
            softmax_scale=kind.scale if latent else config.softmax_scale,
            cp_comm_type=kind.comm_type,
            pg_collection=groups,
            **sizes,
        )
        if kind.sink == "learnable":  # which begins near 0
            layer.softmax_offset.data.copy_(torch.linspace(-1.0, 2.0, kind.heads))
    return layers


def _settings(tested: ExaminedLayers) -> Probe:
    """Probe that the layers have the declared window and share one plan for the microbatch, which
    is made once.
    """
    query, declared = tested.positions.T, tested.kind.window  # of the shape of queries
    plan, wrong = tested.first.plan_of(query, "causal", tested.batch.packed), []
    for number, layer in tested.layers.items():
        if layer.window != declared:
            wrong.append(f"layer {number} has window {layer.window}, declared {declared}")
        elif layer.plan_of(query, "causal", tested.batch.packed) is not plan:
            wrong.append(f"layer {number} has another plan")
    return tested.probe("settings", len(wrong), 0.0, min(wrong, default=""), "layers")
