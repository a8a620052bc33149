"""Compares the outputs and gradients of attention layers for random tensors with float64.

Shapes: as in `tested_layer`; m sampled queries of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import attend
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.plan.sizes.attention_sizes import WIRES

# Bound of the norm of an error over the norm of the truth: three times the error of kernels that
# round partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
# factor of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0

Tensors = dict[str, Tensor]


def value_probes(
    tested: TestedLayer, layers: Mapping[int, Any], samples: int | None = None
) -> list[Probe]:
    """Compare outputs and gradients of `layers`, by number, for the same random tensors; return the
    worst layer for each of them. With `samples`, compare that number of queries of this rank only.
    """
    inputs, sampled = _draw(tested, samples)
    truth = _reference(tested, inputs, sampled)
    worst: dict[str, Probe] = {}
    for number, layer in layers.items():
        computed = _of_layer(replace(tested, layer=layer), inputs, sampled)
        for name, expected in truth.items():
            probe = _probe(tested, name, computed[name], expected, sampled)
            if number != tested.kind.layer:
                probe = replace(probe, where=f"layer {number}, {probe.where}")
            worst[name] = max(worst.get(name, probe), probe, key=lambda each: each.badness)
    return [*worst.values()]


def _draw(tested: TestedLayer, samples: int | None) -> tuple[Tensors, Tensor]:
    """Draw random tensors of whole batch rows, the same on all ranks: q, k, v, and the gradient of
    this rank's outputs, dout [b, s, h, e], which is zero for queries that are not compared.

    Returns them and the indices, int64 [m], of the compared queries among this rank's tokens.
    """
    kind, (batch_size, s) = tested.kind, tested.positions.shape
    # large tensors are drawn on the device that needs them
    on_device = tested.device if samples else torch.device("cpu")
    generator = torch.Generator(on_device).manual_seed(tested.seed)

    def normal(heads: int, size: int) -> Tensor:
        shape = batch_size, kind.tokens, heads, size
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=on_device)
        return x.to(tested.device, tested.dtype)

    sizes = {"q": (kind.heads, kind.d), "k": (kind.groups, kind.d), "v": (kind.groups, kind.e)}
    inputs = {name: normal(*size) for name, size in sizes.items()}
    dout = tested.local(normal(kind.heads, kind.e))
    spread = torch.linspace(0, s - 1, min(samples or s, s))
    inner = torch.tensor([s // 2 - 1, s // 2])  # the two chunks that a rank holds meet here
    sampled = torch.cat([spread.long(), inner]).unique().to(tested.device)
    kept = torch.zeros_like(dout).index_copy(1, sampled, dout[:, sampled])
    return inputs | {"dout": kept}, sampled


def _of_layer(tested: TestedLayer, inputs: Tensors, sampled: Tensor) -> Tensors:
    """Return the layer's results by name: out and dq of the sampled queries [b, m, h, size], dk and
    dv of this rank's keys, and the gradient `dsink` [h] of a learnable sink.
    """
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        out = tested.call(**leaves)
    if tested.kind.sink == "learnable":
        leaves["sink"] = tested.layer.softmax_offset
    grads = _gradients(out, leaves, inputs["dout"])
    computed = {name: tested.local(grads[name]) for name in ("dq", "dk", "dv")}
    computed |= {"out": out.detach()[:, sampled], "dq": computed["dq"][:, sampled]}
    if "dsink" in grads:
        computed["dsink"] = tested.summed(grads["dsink"].double())
    return computed


def _gradients(out: Tensor, leaves: Tensors, dout: Tensor) -> Tensors:
    grads = torch.autograd.grad(
        out, list(leaves.values()), dout, allow_unused=True, materialize_grads=True
    )
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _reference(tested: TestedLayer, inputs: Tensors, sampled: Tensor) -> Tensors:
    """Compute the results of the declared layer in float64. Each rank computes its own queries, and
    gradients of keys are summed over the group.
    """
    kind = tested.kind
    keys = torch.arange(kind.tokens, device=tested.device)
    leaves = inputs | {"q": tested.local(inputs["q"])[:, sampled]}
    dout = leaves.pop("dout")[:, sampled].double()
    if kind.sink != "vanilla":
        leaves["sink"] = tested.layer.softmax_offset
    leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    of_rows = zip(
        leaves["q"], leaves["k"], leaves["v"], tested.positions[:, sampled], tested.batch.rules,
        strict=True,
    )  # fmt: skip
    with torch.enable_grad():
        outputs = [
            attend(q, k, v, rule.allowed(mine, keys, kind.probed), kind.scale, leaves.get("sink"))
            for q, k, v, mine, rule in of_rows
        ]
        out = torch.stack(outputs)
    grads = _gradients(out, leaves, dout)
    truth = {"out": out.detach(), "dq": grads["dq"]}
    truth |= {name: tested.local(tested.summed(grads[name])) for name in ("dk", "dv")}
    if kind.sink == "learnable":
        truth["dsink"] = tested.summed(grads["dsink"])
    return truth


def _probe(
    tested: TestedLayer, name: str, computed: Tensor, truth: Tensor, sampled: Tensor
) -> Probe:
    difference = computed.double() - truth
    bound = BOUNDS[tested.dtype] + WIRES[getattr(tested.layer, "wire", "plain")].widening
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
