"""`cp-ring bench accuracy`: the error of ring attention against float64, divided by the error of
one kernel call.

The one call attends to the whole sequence with the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.errors import KernelError
from cp_ring.kernels import choose
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.plan.sizes.attention_sizes import WIRES
from cp_ring.runtime import RUNTIME
from cp_ring.testing.local_ring import LocalRing

PARTS = ("out", "dq", "dk", "dv")
Results = dict[tuple[Any, ...], dict[str, Any]]
"""Results by kernel, dtype, mask, number of ranks and codec."""


def masks(n: int) -> dict[str, Mask]:
    """One mask of each kind, for `n` tokens."""
    return {
        "causal": Mask.causal(n),
        "full": Mask.full(n),
        "window": Mask.causal(n, (n // 3, 0)),
        "documents": Mask.documents([0, n // 20, n // 2, n * 3 // 4, n]),
        "prefix": Mask.prefix(n, n // 4),
    }


INPUTS = ("normal", "outliers")
OUTLIERS, OUTLIER_FACTOR = 32, 20.0
"""With `outliers`, each channel of keys and values whose number divides by OUTLIERS is
OUTLIER_FACTOR times larger than the others.
"""


def draw(cases: AccuracyCases, seed: int) -> list[Tensor]:
    """q, k, v, dout in float64, N(0, 1), [1, n, heads, head_dim].

    With `outliers`, some channels of k and v are larger, and q is smaller there, so that the scores
    keep their size.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, cases.n, heads, cases.head_dim, generator=generator, dtype=torch.float64)
        for heads in (cases.heads, cases.kv_heads, cases.kv_heads, cases.heads)
    )
    if cases.inputs == "outliers":
        for x, factor in ((k, OUTLIER_FACTOR), (v, OUTLIER_FACTOR), (q, 1 / OUTLIER_FACTOR)):
            x[..., ::OUTLIERS] *= factor
    return [q, k, v, dout]


def one_call(mask: Mask, inputs: list[Tensor], kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of one rank: one call of the kernel, if the kernel supports the mask.

    The CPU kernel supports masks other than causal and full as a dense bias only. The ring never
    gives it a bias. So this calls PyTorch's own operator, with the bias, in the dtype of the
    inputs.
    """
    if inputs[0].device.type == "cpu" and kernel == "cpu":
        return _one_torch_call(mask, inputs)
    plan = Plan.build(mask, Layout.contiguous(mask.n, 1))
    return _attend_to_shard(None, plan, inputs, kernel)


def _one_torch_call(mask: Mask, inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of PyTorch's operator for the CPU."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs)
    plain = mask.name == "full" or (
        mask.name == "causal" and mask.area() == mask.n * (mask.n + 1) // 2
    )
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5}
    if not plain:
        options["attn_mask"] = (
            torch.zeros(mask.n, mask.n)
            .masked_fill(~torch.from_numpy(mask.dense()), -torch.inf)
            .to(q.dtype)
        )
    causal = plain and mask.name == "causal"
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, **options
    )
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [
        x.transpose(1, 2) for x in (out, *backward(dout, q, k, v, out, lse, 0.0, causal, **options))
    ]


def _attend_to_shard(
    group: Any,
    plan: Plan,
    inputs: list[Tensor],
    kernel: str,
    wire: str = "plain",
) -> list[Tensor]:
    """out, dq, dk, dv of this rank's shard; `inputs` are those of the whole sequence."""
    q, k, v, dout = (plan.layout.shard(x, group.rank if group else 0, 1) for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, group, plan=plan, kernel=kernel, wire=wire)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The relative error of each of out, dq, dk, dv: norm of the difference divided by norm of the
    truth.
    """
    return [
        float((x.double().cpu() - y).norm() / y.norm()) for x, y in zip(got, truth, strict=True)
    ]


@dataclass(frozen=True)
class AccuracyCases:
    """The cases of the bench: each kernel with each dtype, context parallel size and codec.

    seeds: random draws, of which the mean counts. inputs: one of `INPUTS`.
    """

    n: int
    heads: int
    kv_heads: int
    head_dim: int
    kernels: Sequence[str] = ("cpu",)
    dtypes: Sequence[str] = ("float32",)
    cp: Sequence[int] = (1, 2, 4, 8)
    wires: Sequence[str] = ("plain",)
    inputs: str = "normal"
    seeds: int = 5
    device: str = "cpu"
    schedule: str = "auto"


def run(cases: AccuracyCases) -> list[dict[str, Any]]:
    """Results {kernel, dtype, mask, cp, wire, out, dq, dk, dv}: mean ratios over the draws.

    With `wire` other than plain they also have `error`, the mean errors of the same four
    themselves.

    Where a kernel does not support the case, the result has the reason in `rejected` instead of
    ratios.
    """
    results: Results = {}
    for name, mask in masks(cases.n).items():
        whole = Plan.build(mask, Layout.contiguous(cases.n, 1))
        for seed in range(cases.seeds):
            exact = draw(cases, seed)
            for dtype in cases.dtypes:
                inputs = [x.to(getattr(torch, dtype)).to(cases.device) for x in exact]
                wide = [x.double() for x in inputs]
                truth = [x.cpu() for x in _attend_to_shard(None, whole, wide, "reference")]
                for kernel in cases.kernels:
                    case = {"kernel": kernel, "dtype": dtype, "mask": name}
                    _add_ratios(results, cases, case, mask, inputs, truth)
    for result in results.values():
        for values in (result, result.get("error", {})):
            for part in PARTS:
                if part in values:
                    values[part] = sum(values[part]) / len(values[part])
    return list(results.values())


@RUNTIME.cache()
def _ring(cp: int) -> LocalRing:
    """The same threads for all cases."""
    return LocalRing(cp)


def _add_ratios(
    results: Results,
    cases: AccuracyCases,
    case: dict[str, Any],
    mask: Mask,
    inputs: list[Tensor],
    truth: list[Tensor],
) -> None:
    """Measures one kernel with one draw; appends the ratios to the lists in `results`."""
    (q, _, v, _), kernel = inputs, case["kernel"]
    try:
        choose(kernel, device=q.device, dtype=q.dtype, d=q.shape[-1], e=v.shape[-1])
    except KernelError as error:
        results[tuple(case.values())] = {**case, "rejected": str(error)}
        return
    single = errors(one_call(mask, inputs, kernel), truth)
    for cp in cases.cp:
        layout = Layout.zigzag(mask.n, cp)
        slot_shards = max(cp, SLOT_SHARDS)
        plan = Plan.build(mask, layout, schedule=cases.schedule, slot_shards=slot_shards)
        for wire in cases.wires:
            parts = _ring(cp).run(_attend_to_shard, plan, inputs, kernel, wire)
            got = [layout.unshard([part[i] for part in parts], 1) for i in range(4)]
            new = {**case, "cp": cp, "wire": wire}
            result = results.setdefault(tuple(new.values()), new)
            for part, of_ring, of_call in zip(PARTS, errors(got, truth), single, strict=True):
                result.setdefault(part, []).append(of_ring / of_call if of_call else math.inf)
                if not WIRES[wire].plain:
                    result.setdefault("error", {}).setdefault(part, []).append(of_ring)
