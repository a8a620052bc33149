"""Compares the outputs and gradients of one attention layer for random tensors with float64.

Shapes: as in `tested_layer`; m sampled queries of a rank, c a latent, r the rotated part of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import attend
from cp_ring.megatron.certificate.report import Probe
from cp_ring.megatron.certificate.tested_layer import TestedLayer
from cp_ring.plan.sizes.attention_sizes import WIRES

if TYPE_CHECKING:
    from cp_ring.comm.latent import Latents

# Bound of the norm of an error over the norm of the truth: three times the error of kernels that
# round partial results to the input's precision and add them up in float32.
BOUNDS = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}
PARAMETERS = ("sink", "weight")  # their gradients are summed over the context-parallel ranks
# factor of the bound: the gradient of a sink is a sum over all queries in which much cancels out
SINK_FACTOR = 20.0
# factor of the bound in 16 bits: keys, and gradients of latents, are rounded once more
LATENT_FACTOR = 2.0


@dataclass(frozen=True)
class RandomTensors:
    """Random tensors of whole batch rows, the same on all ranks: q [b, n, h, d] and the tensors
    that make keys and values.

    `of_keys` are k [b, n, g, d] and v [b, n, g, e]; if latents travel, they are latent [b, n, 1,
    c], rope [b, n, 1, r] and weight.

    `sampled` are the indices, int64 [m], among this rank's tokens of the compared queries, the same
    for every batch row. `dout` [b, s, h, e], the gradient of this rank's outputs, is zero for other
    queries.
    """

    q: Tensor
    of_keys: dict[str, Tensor]
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
    kind, batch = tested.kind, tested.batch
    batch_size, s = batch.positions.shape
    # large tensors are drawn on the device that needs them
    on_device = tested.device if samples else torch.device("cpu")
    generator = torch.Generator(on_device).manual_seed(tested.seed)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=on_device)
        return x.to(tested.device, tested.dtype)

    def normal(heads: int, size: int) -> Tensor:
        return drawn(batch_size, kind.tokens, heads, size)

    q = normal(kind.heads, kind.d)
    if tested.of_latents:
        from cp_ring.megatron.certificate import latent_probe

        of_keys = latent_probe.draw(tested.layer.config, kind.groups, normal, drawn)
    else:
        of_keys = {"k": normal(kind.groups, kind.d), "v": normal(kind.groups, kind.e)}
    dout = batch.local(normal(kind.heads, kind.e))
    places = {*range(s)}
    if samples is not None and samples < s:
        ends = [0, s // 2 - 1, s // 2, s - 1]  # ends of the chunks that a rank holds
        places = {*ends, *torch.linspace(1, s - 2, samples - len(ends)).long().tolist()}
    sampled = torch.tensor(sorted(places), device=tested.device)
    kept = torch.zeros_like(dout).index_copy(1, sampled, dout[:, sampled])
    return RandomTensors(q, of_keys, kept, sampled)


def _of_layer(tested: TestedLayer, inputs: RandomTensors) -> dict[str, Tensor]:
    """Return the layer's results by name: out and dq of the sampled queries [b, m, h, size], dk and
    dv of this rank's keys.

    Gradients of parameters are summed over ranks: `dsink` [h] of a learnable sink, and `dweight` if
    latents travel.
    """
    batch, sink = tested.batch, tested.layer.softmax_offset
    tensors = {"q": inputs.q, **inputs.of_keys}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    if sink is not None and sink.requires_grad:
        leaves["sink"] = sink
    with torch.enable_grad():
        out = tested.call(leaves["q"], *_keys(tested, leaves), _latents(tested, leaves))
    computed = {"out": out.detach()[:, inputs.sampled]}
    for name, grad in _gradients(out, leaves, inputs.dout).items():
        if name in PARAMETERS:
            computed["d" + name] = tested.summed(grad.double())
        else:
            mine = batch.local(grad)
            computed["d" + name] = mine[:, inputs.sampled] if name == "q" else mine
    return computed


def _gradients(out: Tensor, leaves: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(
        out, list(leaves.values()), dout, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def _keys(tested: TestedLayer, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of `RandomTensors.of_keys`."""
    if not tested.of_latents:
        return tensors["k"], tensors["v"]
    from cp_ring.megatron.certificate import latent_probe

    return latent_probe.keys(
        tensors["latent"], tensors["rope"], tensors["weight"], tested.layer.config.qk_head_dim
    )


def _latents(tested: TestedLayer, tensors: dict[str, Tensor]) -> Latents | None:
    if not tested.of_latents:
        return None
    from cp_ring.comm.latent import Latents

    weight, key_dim = tensors["weight"], tested.layer.config.qk_head_dim
    return Latents(tensors["latent"].squeeze(2), weight[:, :key_dim], weight[:, key_dim:])


def reference(tested: TestedLayer, inputs: RandomTensors) -> dict[str, Tensor]:
    """Compute the results of the declared layer in float64. Each rank computes its own queries, and
    gradients of keys are summed over the group.
    """
    kind, batch, sink = tested.kind, tested.batch, tested.layer.softmax_offset
    keys = torch.arange(kind.tokens, device=tested.device)
    queries = batch.positions[:, inputs.sampled]
    q = batch.local(inputs.q)[:, inputs.sampled]
    tensors = {"q": q, **inputs.of_keys}
    if sink is not None:
        tensors["sink"] = sink
    leaves = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    with torch.enable_grad():
        of_rows = zip(leaves["q"], *_keys(tested, leaves), queries, batch.rules, strict=True)
        outputs = [
            attend(q, k, v, rule.allowed(mine, keys, kind.probed), kind.scale, leaves.get("sink"))
            for q, k, v, mine, rule in of_rows
        ]
        out = torch.stack(outputs)
    truth = {"out": out.detach()}
    for name, grad in _gradients(out, leaves, inputs.dout[:, inputs.sampled].double()).items():
        if name == "q":
            truth["dq"] = grad
        elif name not in PARAMETERS:
            truth["d" + name] = batch.local(tested.summed(grad))
        elif name != "sink" or kind.sink == "learnable":
            truth["d" + name] = tested.summed(grad)
    return truth


def _probe(
    tested: TestedLayer, name: str, computed: Tensor, truth: Tensor, sampled: Tensor
) -> Probe:
    difference = computed.double() - truth
    bound = BOUNDS[tested.dtype] + WIRES[tested.layer.wire].widening
    if name == "dsink":
        bound *= SINK_FACTOR
    elif tested.of_latents and tested.dtype.itemsize == 2:
        bound *= LATENT_FACTOR
    where = ""
    if computed.dim() == 4:
        worst = int(difference.abs().amax((2, 3)).nan_to_num(torch.inf).argmax())
        batch_row, token = divmod(worst, computed.shape[1])
        what, positions = "key", tested.batch.positions[batch_row]
        if name in ("out", "dq"):
            what, positions = "query", positions[sampled]
        where = f"worst at {what} {int(positions[token])} of batch row {batch_row}"
    return tested.probe(name, float(difference.norm()) / (float(truth.norm()) or 1.0), bound, where)
