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
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error

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


def one_call(mask: Mask, case: Case, kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of one rank: one call of the kernel, if the kernel supports the mask.

    The CPU kernel supports masks other than causal and full as a dense bias only. The ring never
    gives it a bias. So this calls PyTorch's own operator, with the bias, in the dtype of the
    inputs.
    """
    if case.q.device.type != "cpu":
        plan = Plan.build(mask, Layout.contiguous(mask.n, 1))
        return _attend_to_shard(None, plan, case, kernel)
    q, k, v, dout = (x.detach().transpose(1, 2) for x in case)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dense = torch.from_numpy(mask.dense())
    causal = bool((dense == torch.ones_like(dense).tril()).all())
    bias = torch.zeros(dense.shape, dtype=q.dtype).masked_fill_(~dense, -torch.inf)
    how: dict[str, Any] = {} if causal or dense.all() else {"attn_mask": bias}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, **how)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


def _attend_to_shard(group: Any, plan: Plan, case: Case, kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of this rank's shard; `case` has the whole sequence."""
    q, k, v, dout = (plan.layout.shard(x, group.rank if group else 0, 1) for x in case)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, group, plan=plan, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(got: list[Tensor], truth: list[Tensor]) -> Tensor:
    """The relative errors of out, dq, dk and dv."""
    return torch.tensor([error(x.cpu(), y.cpu()) for x, y in zip(got, truth, strict=True)])


def run(cases: AccuracyCases) -> list[dict[str, Any]]:
    """Results {mask, cp, out, dq, dk, dv}: mean ratios over the draws. Raises `KernelError` where
    the kernel does not support the case.
    """
    n, dtype = cases.n, getattr(torch, cases.dtype)
    results = []
    for name, mask in masks(n).items():
        ratios: dict[int, list[Tensor]] = {cp: [] for cp in cases.cp}
        for seed in range(cases.seeds):
            drawn = Case.draw(
                n, h=cases.heads, g=cases.kv_heads, d=cases.head_dim, seed=seed, dtype=torch.float64
            )
            case = Case(*(x.to(cases.device, dtype) for x in drawn))
            whole = Plan.build(mask, Layout.contiguous(n, 1))
            wide = Case(*(x.double() for x in case))
            truth = _attend_to_shard(None, whole, wide, "reference")
            single = errors(one_call(mask, case, cases.kernel), truth)
            for cp in cases.cp:
                layout, slots = Layout.zigzag(n, cp), max(cp, SLOT_SHARDS)
                plan = Plan.build(mask, layout, schedule=cases.schedule, slot_shards=slots)
                parts = LocalRing(cp).run(_attend_to_shard, plan, case, cases.kernel)
                got = [layout.unshard([*part], 1) for part in zip(*parts, strict=True)]
                ratios[cp].append(errors(got, truth) / single)
        for cp, found in ratios.items():
            means = torch.stack(found).mean(0).tolist()
            results.append({"mask": name, "cp": cp, **dict(zip(PARTS, means, strict=True))})
    return results
