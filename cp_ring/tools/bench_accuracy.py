"""`cp-ring bench accuracy`: the error of ring attention against float64, divided by the error of
one rank, which attends to the whole sequence with the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cp_ring import Layout, Mask, Plan, ring_attention
from cp_ring.plan.schedule import SLOT_SHARDS
from cp_ring.testing.local_ring import LocalRing
from cp_ring.testing.oracle import Case, error

PARTS = ("out", "dq", "dk", "dv")


def masks(n: int) -> dict[str, Mask]:
    """Return one mask of each kind, for `n` tokens."""
    return {
        "causal": Mask.causal(n),
        "full": Mask.full(n),
        "window": Mask.causal(n, (n // 3, 0)),
        "documents": Mask.documents([0, n // 20, n // 2, n * 3 // 4, n]),
        "prefix": Mask.prefix(n, n // 4),
    }


def attend_to_shard(group: Any, plan: Plan, case: Case, kernel: str) -> list[Tensor]:
    """Return out, dq, dk and dv of this rank's shard of `case`, which has the whole sequence.
    group: None for one rank.
    """
    q, k, v, dout = (plan.layout.shard(x, group.rank if group else 0, 1) for x in case)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, group, plan=plan, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(got: Sequence[Tensor], truth: Sequence[Tensor]) -> Tensor:
    """Return the relative errors of out, dq, dk and dv."""
    return torch.tensor([error(x.cpu(), y.cpu()) for x, y in zip(got, truth, strict=True)])


def run(
    n: int,
    cp: Sequence[int],
    kernel: str = "cpu",
    dtype: str = "float32",
    device: str = "cpu",
    *,
    sizes: tuple[int, int, int] = (2, 1, 64),
    seeds: int = 5,
    schedule: str = "auto",
) -> list[dict[str, Any]]:
    """Results {mask, cp, out, dq, dk, dv} of `n` tokens at each context parallel size: mean ratios
    over so many draws. sizes: query heads, key/value heads, elements of a head. schedule: of the
    plans.

    Raises `KernelError` where the kernel does not support the case.
    """
    h, g, d = sizes
    results = []
    for name, mask in masks(n).items():
        whole, ratios = Plan.build(mask, Layout.contiguous(n, 1)), []
        for seed in range(seeds):
            drawn = Case.draw(n, h=h, g=g, d=d, seed=seed, dtype=torch.float64)
            case = Case(*(x.to(device, getattr(torch, dtype)) for x in drawn))
            wide = Case(*(x.double() for x in case))
            truth = attend_to_shard(None, whole, wide, "reference")
            single = errors(attend_to_shard(None, whole, case, kernel), truth)
            found = []
            for ranks in cp:
                layout, slots = Layout.zigzag(n, ranks), max(ranks, SLOT_SHARDS)
                plan = Plan.build(mask, layout, schedule=schedule, slot_shards=slots)
                parts = LocalRing(ranks).run(attend_to_shard, plan, case, kernel)
                got = [layout.unshard([*part], 1) for part in zip(*parts, strict=True)]
                found.append(errors(got, truth) / single)
            ratios.append(torch.stack(found))
        means = torch.stack(ratios).mean(0).tolist()
        for ranks, each in zip(cp, means, strict=True):
            results.append({"mask": name, "cp": ranks, **dict(zip(PARTS, each, strict=True))})
    return results
