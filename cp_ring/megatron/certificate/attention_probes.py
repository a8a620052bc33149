"""Probes every attention layer of the job over the context-parallel group: each must be built as
the flags declare, and compute what the declared layer computes.

Layers of a kind run on the same short microbatch, and must share the plan of the job's own sequence
length. The first one is also probed at a few positions of that length, up to `LONG` tokens behind
its window.

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
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.heads_choice import every_choice
from cp_ring.megatron.certificate.batch import Batch, own_device, worst_of
from cp_ring.megatron.certificate.dense_oracle import allowed_pairs, attend
from cp_ring.megatron.certificate.layer_kinds import (
    LayerKind,
    find_layer_kinds,
    masks_of,
    unit_of,
)
from cp_ring.megatron.certificate.report import Certificate, Probe
from cp_ring.megatron.certificate.tiny_model import core_classes, transformer_config
from cp_ring.megatron.flags.layer_pattern import config_of_layer
from cp_ring.megatron.wrapping import replaced
from cp_ring.options import CallSettings

CHANNELS = 512  # most channels of values that a call needs
CALLS = 4  # where all queries are compared
# Bound of the norm of an error over the norm of the truth: three times the error of kernels that
# round partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
# factor of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0

SAMPLED = 16  # queries of a rank and batch row that are compared at the job's own length
LONG = {"cpu": 2048, "cuda": 8192}  # most tokens of all these batch rows together


@dataclass(frozen=True)
class ExaminedLayers:
    """Core attention layers of one `kind` by number, with their dtype, the seed of random tensors,
    and a microbatch.

    Attributes:
        note: appended to the names of their probes.
        samples: how many queries of this rank are compared; 0 for all of them.
    """

    kind: LayerKind
    layers: Mapping[int, Any]
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
    def sampled(self) -> Tensor:
        """The indices, int64 [m], of the compared queries among this rank's tokens."""
        s = self.batch.mine.shape[1]
        return _spread(s, self.samples or s)

    def about(self, name: str) -> tuple[str, str, str]:
        """Name a probe of these layers."""
        return name + self.note, self.kind.layer_name, self.batch.mask

    def probes(self) -> Iterator[Probe]:
        """Probe the mask of the first layer, and the values of all layers."""
        yield from self._masks()
        yield from self._values()

    def _call(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call a layer with this rank's tokens of whole batch rows [b, n, heads, size]; return out
        [b, s, h, e].
        """
        from megatron.core.transformer.enums import AttnMaskType

        thd = self.batch.mask == "packed"
        local = map(self.batch.on_rank, (q, k, v))
        given = [x[0] if thd else x.transpose(0, 1).contiguous() for x in local]
        named = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": self.batch.packed}
        out: Tensor = layer(*given, None, **named)
        return out.reshape(*self.batch.mine.T.shape, self.kind.heads, -1).transpose(0, 1)

    def _masks(self) -> Iterator[Probe]:
        """Change one token's value, and the gradient of its query's output, and find the outputs,
        and the gradients of values, that change: in one call for each of at most `CALLS` groups of
        tokens.
        """
        kind = self.kind
        channels = min(CHANNELS, kind.groups * kind.e)
        tokens = _spread(self.batch.shape[1], channels * (1 if self.samples else CALLS))
        found: dict[str, list[list[int]]] = {"mask": [], "mask of gradients": []}
        q, k = (self._ones(tokens[:0], heads, kind.d) for heads in (kind.heads, kind.groups))
        for picked in tokens.split(channels):
            v = self._ones(picked, kind.groups, kind.e).requires_grad_()
            with torch.enable_grad():
                out = self._call(self.first, q, k, v)
            dout = self.batch.on_rank(self._ones(picked, kind.heads, kind.e))
            (dv,) = torch.autograd.grad(out, v, dout)
            found["mask"] += self._wrong_pairs(
                out[:, :, :: kind.heads // kind.groups], picked, True
            )
            found["mask of gradients"] += self._wrong_pairs(self.batch.on_rank(dv), picked, False)
        for name, wrong in found.items():
            where = ""
            for row, query, key, seen in wrong[:1]:
                sees, declared = ("sees", "hidden") if seen else ("does not see", "visible")
                where = f"query {query} {sees} key {key} of batch row {row}, which is declared "
                where += declared
            yield Probe(*self.about(name), len(wrong), 0.0, where)

    def _ones(self, picked: Tensor, heads: int, size: int) -> Tensor:
        """Return zeros [b, n, heads, size] of whole batch rows, with a one for each picked token,
        in its own channel of the first head that shares a key/value head.
        """
        x = torch.zeros(*self.batch.shape, heads, size, dtype=self.dtype, device=own_device())
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
        queries, keys = self.batch.mine, picked.expand(len(seen), -1)
        if not of_keys:
            seen, queries, keys = seen.mT, keys, queries
        wrong = seen != allowed_pairs(self.batch.rules, queries, keys, self.kind.window)
        row, query, key = wrong.nonzero(as_tuple=True)
        found = row, queries[row, query], keys[row, key], seen[wrong].long()
        return torch.stack(found, 1).tolist()

    def _values(self) -> Iterator[Probe]:
        """Compare outputs and gradients of all layers for the same random tensors, the same on all
        ranks.
        """
        kind, batch, sampled, sink = self.kind, self.batch, self.sampled, None
        random = torch.Generator(own_device()).manual_seed(self.seed)

        def draw(heads: int, size: int) -> Tensor:
            whole = *batch.shape, heads, size
            return torch.randn(whole, generator=random, device=random.device).to(self.dtype)

        sizes = (kind.heads, kind.d), (kind.groups, kind.d), (kind.groups, kind.e)
        qkv, dout = [draw(*size) for size in sizes], draw(kind.heads, kind.e)
        keys = torch.arange(batch.shape[1]).expand(batch.shape)
        allowed = allowed_pairs(batch.rules, batch.mine[:, sampled], keys, kind.window)
        if kind.sink != "vanilla":
            sink = self.first.softmax_offset.detach().double().requires_grad_()

        def declared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(batch.on_rank(q)[:, sampled], k, v, allowed, kind.scale, sink)

        truth = self._results(declared, [x.double() for x in qkv], dout, sink)
        for number, layer in self.layers.items():

            def computed(*qkv: Tensor, layer: Any = layer) -> Tensor:
                return self._call(layer, *qkv)[:, sampled]

            used = getattr(layer, "ring", CallSettings())
            found = self._results(computed, qkv, dout, getattr(layer, "softmax_offset", None))
            for name, expected in truth.items():
                error, where = found[name] - expected, f"layer {number}"
                bound = BOUNDS[self.dtype] + used.widening
                if name in ("dk", "dv"):
                    bound = max(bound, used.rounding * BOUNDS[torch.bfloat16])
                if name == "dsink":
                    bound *= SINK_FACTOR
                else:
                    places = batch.mine[:, sampled] if name in ("out", "dq") else batch.mine
                    where += f", worst at {worst_of(error, places)}"
                size = float(expected.norm()) or 1.0
                yield Probe(*self.about(name), float(error.norm()) / size, bound, where)

    def _results(
        self, attention: Callable[..., Tensor], qkv: list[Tensor], dout: Tensor, sink: Tensor | None
    ) -> dict[str, Tensor]:
        """Return what `attention` of whole batch rows makes of its inputs, float64: out and dq of
        the sampled queries [b, m, h, size], dk and dv of this rank's keys, and the gradient `dsink`
        [h] of a learnable sink. The ranks add up gradients, because each computes its own queries
        or keys.
        """
        leaves = [x.detach().requires_grad_() for x in qkv]
        with torch.enable_grad():
            out = attention(*leaves)
        if sink is not None and self.kind.sink == "learnable":
            leaves.append(sink)
        given = self.batch.on_rank(dout)[:, self.sampled].to(out.dtype)
        grads = torch.autograd.grad(out, leaves, given, allow_unused=True, materialize_grads=True)
        found = {"out": out.detach().double()}
        for name, grad in zip(("dq", "dk", "dv", "dsink"), grads, strict=False):
            total = grad.double()
            dist.all_reduce(total, group=compat.group_of(None, "cp"))
            found[name] = total if name == "dsink" else self.batch.on_rank(total)
        return found | {"dq": found["dq"][:, self.sampled]}


def probe_layers(args: argparse.Namespace, results: Certificate, seed: int) -> None:
    """Probe every kind of layer of the job with each mask over the context-parallel group in force.

    Where latents travel, layers are probed with their keys and values: the tiny model has latents.
    """
    config = transformer_config(args)
    used, dtype = settings.current(), args.params_dtype
    if used.wire == "latent":
        used = replace(used, wire="plain")
        if dtype != torch.float32:
            results.not_covered += [f"latents in {str(dtype).removeprefix('torch.')}"]
    kinds = find_layer_kinds(args, config)
    classes = core_classes(args, config, kinds)
    n, cp, unit = args.seq_length, args.context_parallel_size, unit_of(args)
    with settings.in_force(used):
        made = [(kind, _make_layers(classes[kind.layer], config, kind)) for kind in kinds]
        for (kind, layers), mask in itertools.product(made, masks_of(args)):
            draw = partial(Batch.draw, mask, args.micro_batch_size, cp=cp, padded=True)
            short = ExaminedLayers(kind, layers, dtype, seed, draw(n=kind.tokens))
            own: Any = getattr(short.first, "spec", None)  # of ring attention
            # each number of heads that a plan of ring attention may choose
            for spec in every_choice(own, cp) if own else [own]:
                one = short if spec == own else replace(short, note=f" with heads {spec.ulysses}")
                with replaced(*((layer, "spec", spec) for layer in layers.values())):
                    results.probes += one.probes()
            if own:
                results.probes += [_same_plan(replace(short, batch=draw(n=max(n, kind.tokens))))]
            window = kind.window[0] + 1 if kind.window[0] < n else 0
            most = LONG[own_device().type] // short.batch.shape[0] + window
            tokens = max(kind.tokens, min(n, most // unit * unit))
            if tokens > kind.tokens:
                long = replace(
                    short,
                    layers={kind.layer: short.first},
                    batch=draw(n=tokens),
                    note=f" at {tokens} tokens",
                    samples=SAMPLED,
                )
                results.probes += long.probes()
            if tokens < n:
                results.up_to[f"{kind.layer_name} under {mask}"] = f"{tokens} of {n} tokens"


def _make_layers(made: Any, config: Any, kind: LayerKind) -> dict[int, Any]:
    """Build the job's core attention of each layer of this kind, of the class `made`, as its
    attention layer does.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp", "hcp"])
    given, layers = {"softmax_scale": config.softmax_scale}, {}
    if config.multi_latent_attention:
        given = {"softmax_scale": kind.scale, "k_channels": kind.d, "v_channels": kind.e}
    for number in kind.numbers:
        layers[number] = layer = made(
            config_of_layer(config, number),
            number,
            AttnMaskType.causal,
            "self",
            attention_dropout=0.0,
            cp_comm_type=kind.comm_type,
            pg_collection=groups,
            **given,
        )
        if kind.sink == "learnable":  # which begins near 0
            layer.softmax_offset.data.copy_(torch.linspace(-1.0, 2.0, kind.heads))
    return layers


def _same_plan(tested: ExaminedLayers) -> Probe:
    """Probe that all layers share the plan of the first one for the microbatch, which depends on
    their windows.
    """
    queries = tested.batch.mine.T, "causal", tested.batch.packed  # tokens of the shape of queries
    plans = {number: layer.plan_of(*queries) for number, layer in tested.layers.items()}
    wrong = [number for number, plan in plans.items() if plan is not plans[tested.kind.layer]]
    where = f"layer {wrong[0]} has another one than the first of its kind" if wrong else ""
    return Probe(*tested.about("plan"), len(wrong), 0.0, where, "layers")


def _spread(n: int, most: int) -> Tensor:
    """Return at most `most` of the numbers 0 to n - 1, evenly spread, int64."""
    return torch.linspace(0, n - 1, min(n, most), device=own_device()).round().long()
