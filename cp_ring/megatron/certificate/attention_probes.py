"""Probes attention layers on one microbatch, over their context-parallel group.

The mask: which outputs depend on a token, and which gradients depend on a query. With equal scores
everything is linear in the values, and each channel of the value heads belongs to one token. So one
call probes as many tokens as there are channels. Values: outputs and gradients for random tensors,
compared with float64.

Shapes: s tokens of this rank, m of them whose queries are compared, n tokens of a batch row, b
batch rows, h query and g key/value heads, d and e head sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.dense_oracle import allowed_pairs, attend
from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.report import Probe
from cp_ring.plan.sizes.attention_sizes import WIRES

CHANNELS = 512  # most channels of values that a call needs
# Bound of the norm of an error over the norm of the truth: three times the error of kernels that
# round partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
# factor of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ExaminedLayers:
    """Core attention layers of one kind by number, with their context-parallel group, dtype and
    device, the seed of random tensors, and the batch rows of a microbatch.
    """

    layers: Mapping[int, Any]
    group: Any
    dtype: torch.dtype
    device: torch.device
    seed: int
    batch: Batch
    note: str = ""  # appended to the names of its probes

    @property
    def kind(self) -> LayerKind:
        return self.batch.kind

    @property
    def first(self) -> Any:
        """The first layer of its kind, which alone is examined pair by pair."""
        return self.layers[self.kind.layer]

    @cached_property
    def positions(self) -> Tensor:
        """The indices in their batch rows of this rank's tokens, int64 [b, s]."""
        return self.batch.positions[self.group.rank()].to(self.device)

    @cached_property
    def packed(self) -> Any:
        """The `packed_seq_params` of the microbatch; offsets are on the device, as kernels of other
        libraries read them.
        """
        moved = copy(self.batch.packed)
        if moved is not None:
            tensors = {name: x for name, x in vars(moved).items() if isinstance(x, Tensor)}
            vars(moved).update({name: x.to(self.device) for name, x in tensors.items()})
        return moved

    def probe(self, name: str, error: float, bound: float, where: str) -> Probe:
        """Make the result of a probe of these layers."""
        return Probe(name + self.note, self.kind.layer_name, self.kind.mask, error, bound, where)

    def zeros(self, heads: int, size: int) -> Tensor:
        """Return zeros [b, n, heads, size] of whole batch rows."""
        shape = len(self.positions), self.kind.tokens, heads, size
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def local(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of whole batch rows: [b, n, ...] to [b, s, ...]."""
        of_each = zip(whole, self.positions, strict=True)
        return torch.stack([batch_row.index_select(0, mine) for batch_row, mine in of_each])

    def summed(self, x: Tensor) -> Tensor:
        """Sum x over the context-parallel ranks, in place, and return it."""
        if self.group.size() > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def call(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, sampled: Any = slice(None)
    ) -> Tensor:
        """Call a layer with this rank's tokens of whole batch rows [b, n, heads, size]; return out
        [b, s, h, e], or that of the `sampled` tokens.
        """
        from megatron.core.transformer.enums import AttnMaskType

        thd = self.kind.mask == "packed"
        local = [self.local(x) for x in (q, k, v)]
        given = [x[0] if thd else x.transpose(0, 1).contiguous() for x in local]
        named = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": self.packed}
        out: Tensor = layer(*given, None, **named)
        heads = out.reshape(*self.positions.T.shape, self.kind.heads, -1)
        return heads.transpose(0, 1)[:, sampled]


def probes(tested: ExaminedLayers, rounds: int, samples: int | None = None) -> list[Probe]:
    """Return the probes of the mask of the first layer, and of the values of all layers."""
    return [*mask_probes(tested, rounds), *value_probes(tested, samples)]


def mask_probes(tested: ExaminedLayers, rounds: int) -> list[Probe]:
    """Change one token's value, or the gradient of one query's output, and find the outputs, or the
    gradients of values, that change. `rounds` limits the number of calls.
    """
    channels = min(CHANNELS, tested.kind.groups * tested.kind.e)
    tokens = _chosen_tokens(tested, rounds * channels)
    rounds_of_tokens = [tokens[at : at + channels] for at in range(0, len(tokens), channels)]
    probes = []
    for name, of_keys in (("mask", True), ("mask of gradients", False)):
        wrong = [_wrong_pairs(tested, picked, of_keys) for picked in rounds_of_tokens]
        count = float(sum(number for number, _ in wrong))
        probes.append(tested.probe(name, count, 0.0, next((w for _, w in wrong if w), "")))
    return probes


def _chosen_tokens(tested: ExaminedLayers, most: int) -> list[int]:
    """Return at most `most` positions to probe, evenly spread and beside edges of chunks, documents
    and windows, where a mask is most likely wrong.
    """
    n, window, parts = tested.kind.tokens, tested.kind.probed[0], 2 * tested.group.size()
    edges = [n * i // parts for i in range(parts)]
    edges += [edge + window for edge in edges] if window >= 0 else []
    edges += [edge for rule in tested.batch.rules for edge in rule.edges]
    near = {edge + side for edge in edges for side in (-1, 0, 1)} & {*range(n)}
    chosen = sorted(near.union(range(0, n, -(-n // most))))
    return chosen[:: -(-len(chosen) // most)]


def _ones(tested: ExaminedLayers, heads: int, picked: list[int]) -> Tensor:
    """Return zeros [b, n, heads, e] with a one for each picked token, in its own channel of the
    first head that shares a key/value head.
    """
    kind, x = tested.kind, tested.zeros(heads, tested.kind.e)
    for number, token in enumerate(picked):
        group, channel = divmod(number, kind.e)
        x[:, token, group * (heads // kind.groups), channel] = 1
    return x


def _changed(tested: ExaminedLayers, picked: list[int], of_keys: bool) -> Tensor:
    """Return [b, s, g, e]: what each picked key adds to outputs, or what the output of each picked
    query adds to the gradients of values.
    """
    kind = tested.kind
    q, k = (tested.zeros(heads, kind.d) for heads in (kind.heads, kind.groups))  # equal scores
    v = _ones(tested, kind.groups, picked if of_keys else []).requires_grad_()
    with torch.enable_grad():
        out = tested.call(tested.first, q, k, v)
    if of_keys:
        return out.detach()[:, :, :: kind.heads // kind.groups]
    (dv,) = torch.autograd.grad(out, v, tested.local(_ones(tested, kind.heads, picked)))
    return tested.local(dv)


def _wrong_pairs(tested: ExaminedLayers, picked: list[int], of_keys: bool) -> tuple[int, str]:
    """Return the number of pairs on which the layer and the declared mask disagree, and the first
    pair as text. `picked` are keys of this rank's queries, or queries of its keys.
    """
    changed = _changed(tested, picked, of_keys)
    seen = changed.flatten(2)[..., : len(picked)] != 0
    mine = tested.positions
    others = torch.tensor(picked, device=mine.device).expand(len(mine), -1)
    queries, keys = (mine, others)[:: 1 if of_keys else -1]
    declared = allowed_pairs(tested.batch.rules, queries, keys, tested.kind.probed)
    wrong = (seen != (declared if of_keys else declared.transpose(1, 2))).nonzero()
    where = ""
    for row, local, other in wrong[:1].tolist():
        query, key = (int(mine[row, local]), picked[other])[:: 1 if of_keys else -1]
        sees = bool(seen[row, local, other])
        where = f"query {query} {'sees' if sees else 'does not see'} key {key} of batch row {row}"
        where += f", which is declared {'hidden' if sees else 'visible'}"
    return len(wrong), where


def value_probes(tested: ExaminedLayers, samples: int | None) -> list[Probe]:
    """Compare outputs and gradients of all layers for the same random tensors; return the worst
    layer for each of them. With `samples`, compare that number of queries of this rank only.
    """
    inputs, sampled = _draw(tested, samples)
    kind, rules, queries = tested.kind, tested.batch.rules, tested.positions[:, sampled]
    keys = torch.arange(kind.tokens, device=tested.device).expand(len(rules), -1)
    allowed = allowed_pairs(rules, queries, keys, kind.probed)
    sink = None
    if kind.sink != "vanilla":
        sink = tested.first.softmax_offset.detach().double().requires_grad_()

    def declared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(tested.local(q)[:, sampled], k, v, allowed, kind.scale, sink)

    exact = {name: x.double() for name, x in inputs.items()}
    truth = _results(tested, declared, exact, sampled, sink)
    worst: dict[str, Probe] = {}
    for number, layer in tested.layers.items():
        call = partial(tested.call, layer, sampled=sampled)
        computed = _results(tested, call, inputs, sampled, getattr(layer, "softmax_offset", None))
        for name, expected in truth.items():
            probe = _probe(tested, name, computed[name], expected, sampled)
            if number != kind.layer:
                probe = replace(probe, where=f"layer {number}, {probe.where}")
            worst[name] = max(worst.get(name, probe), probe, key=lambda each: each.badness)
    return [*worst.values()]


def _draw(tested: ExaminedLayers, samples: int | None) -> tuple[Tensors, Tensor]:
    """Draw random tensors, the same on all ranks: q, k, v of whole batch rows, and the gradient of
    the compared outputs of this rank, dout [b, m, h, e].

    Returns them and the indices, int64 [m], of the compared queries among this rank's tokens.
    """
    kind, (batch_size, s) = tested.kind, tested.positions.shape
    generator = torch.Generator(tested.device).manual_seed(tested.seed)

    def normal(heads: int, size: int) -> Tensor:
        shape = batch_size, kind.tokens, heads, size
        return torch.randn(shape, generator=generator, device=tested.device).to(tested.dtype)

    sizes = {"q": (kind.heads, kind.d), "k": (kind.groups, kind.d), "v": (kind.groups, kind.e)}
    inputs = {name: normal(*size) for name, size in sizes.items()}
    spread = torch.linspace(0, s - 1, min(samples or s, s))
    inner = torch.tensor([s // 2 - 1, s // 2])  # the two chunks that a rank holds meet here
    sampled = torch.cat([spread.long(), inner]).unique().to(tested.device)
    return inputs | {"dout": tested.local(normal(kind.heads, kind.e))[:, sampled]}, sampled


def _results(
    tested: ExaminedLayers,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Tensors,
    sampled: Tensor,
    sink: Tensor | None,
) -> Tensors:
    """Return what `attention` of whole batch rows makes of the inputs: out and dq of the sampled
    queries [b, m, h, size], dk and dv of this rank's keys, and the gradient `dsink` [h] of a
    learnable sink. The ranks add up gradients, because each computes its own queries or keys.
    """
    leaves = {f"d{name}": inputs[name].detach().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        out = attention(*leaves.values())
    if sink is not None and tested.kind.sink == "learnable":
        leaves["dsink"] = sink
    dout, given = inputs["dout"], list(leaves.values())
    grads = torch.autograd.grad(out, given, dout, allow_unused=True, materialize_grads=True)
    summed = (tested.summed(grad.double()) for grad in grads)
    found = {"out": out.detach()} | dict(zip(leaves, summed, strict=True))
    found |= {name: tested.local(found[name]) for name in ("dq", "dk", "dv")}
    return found | {"dq": found["dq"][:, sampled]}


def _probe(
    tested: ExaminedLayers, name: str, computed: Tensor, truth: Tensor, sampled: Tensor
) -> Probe:
    difference = computed.double() - truth
    bound = BOUNDS[tested.dtype] + WIRES[getattr(tested.first, "wire", "plain")].widening
    bound *= SINK_FACTOR if name == "dsink" else 1.0
    where = ""
    if computed.dim() == 4:
        worst = int(difference.abs().amax((2, 3)).nan_to_num(torch.inf).argmax())
        batch_row, token = divmod(worst, computed.shape[1])
        what, positions = "key", tested.positions[batch_row]
        if name in ("out", "dq"):
            what, positions = "query", positions[sampled]
        where = f"worst at {what} {int(positions[token])} of batch row {batch_row}"
    return tested.probe(name, float(difference.norm()) / (float(truth.norm()) or 1.0), bound, where)
