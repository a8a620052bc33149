"""Compares the outputs and gradients of one attention layer for random tensors with float64.

Shapes: as in `tested_layer`; m sampled queries of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RandomTensors:
    """Random tensors of whole batch rows, the same on all ranks: q [b, n, h, d], k [b, n, g, d] and
    v [b, n, g, e].

    `sampled` are the indices, int64 [m], among this rank's tokens of the compared queries, the same
    for every batch row. `dout` [b, s, h, e], the gradient of this rank's outputs, is zero for other
    queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sampled: Tensor


def value_probes(tested: TestedLayer, samples: int | None = None) -> list[Probe]:
    """Compare outputs and gradients for random tensors with float64; with `samples`, for that
    number of queries of this rank only.
    """
    inputs = draw(tested, samples)
    return compare(tested, inputs, reference(tested, inputs))


def compare(tested: TestedLayer, inputs: RandomTensors, truth: dict[str, Tensor]) -> list[Probe]:
    """Compare the layer's results for `inputs` with the truth."""
    computed = _of_layer(tested, inputs)
    return [
        _probe(tested, name, computed[name], expected, inputs.sampled)
        for name, expected in truth.items()
    ]


def draw(tested: TestedLayer, samples: int | None = None) -> RandomTensors:
    """Draw random tensors for the microbatch of `tested`."""
    kind, (batch_size, s) = tested.kind, tested.positions.shape
    # large tensors are drawn on the device that needs them
    on_device = tested.device if samples else torch.device("cpu")
    generator = torch.Generator(on_device).manual_seed(tested.seed)

    def normal(heads: int, size: int) -> Tensor:
        shape = batch_size, kind.tokens, heads, size
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=on_device)
        return x.to(tested.device, tested.dtype)

    q, k, v = normal(kind.heads, kind.d), normal(kind.groups, kind.d), normal(kind.groups, kind.e)
    dout = tested.local(normal(kind.heads, kind.e))
    places = {*range(s)}
    if samples is not None and samples < s:
        ends = [0, s // 2 - 1, s // 2, s - 1]  # ends of the chunks that a rank holds
        places = {*ends, *torch.linspace(1, s - 2, samples - len(ends)).long().tolist()}
    sampled = torch.tensor(sorted(places), device=tested.device)
    kept = torch.zeros_like(dout).index_copy(1, sampled, dout[:, sampled])
    return RandomTensors(q, k, v, kept, sampled)


def _of_layer(tested: TestedLayer, inputs: RandomTensors) -> dict[str, Tensor]:
    """Return the layer's results by name: out and dq of the sampled queries [b, m, h, size], dk and
    dv of this rank's keys, and the gradient `dsink` [h] of a learnable sink.
    """
    sink, sampled = tested.layer.softmax_offset, inputs.sampled
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        out = tested.call(**leaves)
    if tested.kind.sink == "learnable":
        leaves["sink"] = sink
    grads = _gradients(out, leaves, inputs.dout)
    dq, dk, dv = (tested.local(grads.pop(f"d{name}")) for name in "qkv")
    sums = {name: tested.summed(grad.double()) for name, grad in grads.items()}
    return {"out": out.detach()[:, sampled], "dq": dq[:, sampled], "dk": dk, "dv": dv} | sums


def _gradients(out: Tensor, leaves: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(
        out, list(leaves.values()), dout, allow_unused=True, materialize_grads=True
    )
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def reference(tested: TestedLayer, inputs: RandomTensors) -> dict[str, Tensor]:
    """Compute the results of the declared layer in float64. Each rank computes its own queries, and
    gradients of keys are summed over the group.
    """
    kind, sampled = tested.kind, inputs.sampled
    keys = torch.arange(kind.tokens, device=tested.device)
    leaves = {"q": tested.local(inputs.q)[:, sampled], "k": inputs.k, "v": inputs.v}
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
    grads = _gradients(out, leaves, inputs.dout[:, sampled].double())
    truth = {"out": out.detach(), "dq": grads["dq"]}
    truth |= {name: tested.local(tested.summed(grads[name])) for name in ("dk", "dv")}
    return truth | ({"dsink": tested.summed(grads["dsink"])} if kind.sink == "learnable" else {})


def _probe(
    tested: TestedLayer, name: str, computed: Tensor, truth: Tensor, sampled: Tensor
) -> Probe:
    difference = computed.double() - truth
    bound = BOUNDS[tested.dtype] + WIRES[tested.layer.wire].widening
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
