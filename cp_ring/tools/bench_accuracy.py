"""`cp-ring bench accuracy`: the error of ring attention against float64, divided by the error of
one kernel call.

The one call attends to the whole sequence with the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.kernels import choose
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.testing.local_ring import LocalRing

PARTS = ("out", "dq", "dk", "dv")


def masks(n: int) -> dict[str, Mask]:
    """One mask of each kind, for `n` tokens."""
    return {
        "causal": Mask.causal(n),
        "full": Mask.full(n),
        "window": Mask.causal(n, (n // 3, 0)),
        "documents": Mask.documents([0, n // 20, n // 2, n * 3 // 4, n]),
        "prefix": Mask.prefix(n, n // 4),
    }


@dataclass(frozen=True)
class AccuracyCases:
    """The cases of the bench: each context parallel size of `cp`.

    seeds: random draws, of which the mean counts. schedule: of the plans.
    """

    n: int
    heads: int
    kv_heads: int
    head_dim: int
    kernel: str = "cpu"
    dtype: str = "float32"
    cp: Sequence[int] = (1, 2, 4, 8)
    seeds: int = 5
    device: str = "cpu"
    schedule: str = "auto"


def draw(cases: AccuracyCases, seed: int) -> list[Tensor]:
    """q, k, v, dout in float64, N(0, 1), [1, n, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, cases.n, heads, cases.head_dim, generator=generator, dtype=torch.float64)
        for heads in (cases.heads, cases.kv_heads, cases.kv_heads, cases.heads)
    ]


def one_call(mask: Mask, inputs: list[Tensor], kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of one rank: one call of the kernel, if the kernel supports the mask.

    The CPU kernel supports masks other than causal and full as a dense bias only. The ring never
    gives it a bias. So this calls PyTorch's own operator, with the bias, in the dtype of the
    inputs.
    """
    if inputs[0].device.type != "cpu":
        plan = Plan.build(mask, Layout.contiguous(mask.n, 1))
        return _attend_to_shard(None, plan, inputs, kernel)
    q, k, v, dout = (x.detach().transpose(1, 2) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense = torch.from_numpy(mask.dense())
    causal = bool((dense == torch.ones_like(dense).tril()).all())
    bias = torch.zeros(dense.shape, dtype=q.dtype).masked_fill_(~dense, -torch.inf)
    how: dict[str, Any] = {} if causal or dense.all() else {"attn_mask": bias}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, **how)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


def _attend_to_shard(group: Any, plan: Plan, inputs: list[Tensor], kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of this rank's shard; `inputs` are those of the whole sequence."""
    q, k, v, dout = (plan.layout.shard(x, group.rank if group else 0, 1) for x in inputs)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, group, plan=plan, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The relative error of each of out, dq, dk, dv: norm of the difference divided by norm of the
    truth.
    """
    return [
        float((x.double().cpu() - y).norm() / y.norm()) for x, y in zip(got, truth, strict=True)
    ]


def run(cases: AccuracyCases) -> list[dict[str, Any]]:
    """Results {mask, cp, out, dq, dk, dv}: mean ratios over the draws. Raises `KernelError` where
    the kernel does not support the case.
    """
    dtype, size = getattr(torch, cases.dtype), cases.head_dim
    choose(cases.kernel, device=torch.device(cases.device), dtype=dtype, d=size, e=size)
    rings = {cp: LocalRing(cp) for cp in cases.cp}
    results = []
    for name, mask in masks(cases.n).items():
        whole = Plan.build(mask, Layout.contiguous(cases.n, 1))
        ratios: dict[int, list[Tensor]] = {cp: [] for cp in cases.cp}
        for seed in range(cases.seeds):
            inputs = [x.to(cases.device, dtype) for x in draw(cases, seed)]
            wide = [x.double() for x in inputs]
            truth = [x.cpu() for x in _attend_to_shard(None, whole, wide, "reference")]
            single = torch.tensor(errors(one_call(mask, inputs, cases.kernel), truth))
            for cp, ring in rings.items():
                layout, slots = Layout.zigzag(cases.n, cp), max(cp, SLOT_SHARDS)
                plan = Plan.build(mask, layout, schedule=cases.schedule, slot_shards=slots)
                parts = ring.run(_attend_to_shard, plan, inputs, cases.kernel)
                got = [layout.unshard([part[i] for part in parts], 1) for i in range(4)]
                ratios[cp].append(torch.tensor(errors(got, truth)) / single)
        for cp in cases.cp:
            means = torch.stack(ratios[cp]).mean(0).tolist()
            results.append({"mask": name, "cp": cp, **dict(zip(PARTS, means, strict=True))})
    return results
