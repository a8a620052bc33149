"""Attention through dense scores (`dense`), and in float64 with gradients (`brute_force`), without
any code of cp_ring's attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_ring.api import ring_attention
from cp_ring.observe.counters import Counters, record
from cp_ring.plan import Layout, Plan


class Case(NamedTuple):
    """Inputs of one attention, [b, n, heads, head size]; `draw` makes them from a seed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def draw(
        cls,
        n: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        b: int = 1,
        h: int = 4,
        g: int = 2,
        d: int = 16,
        e: int | None = None,
    ) -> Case:
        """Draw N(0, 1) inputs of `n` tokens: b batch rows, h query and g key/value heads, d head
        size of queries and keys, e head size of values, by default the same.
        """
        e = e or d
        generator = torch.Generator().manual_seed(seed)
        shapes = (b, n, h, d), (b, n, g, d), (b, n, g, e), (b, n, h, e)
        q, k, v, dout = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
        )
        return cls(*(x.to(dtype) for x in (q, k, v, dout)))


class Grads(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def logits(
    q: Tensor, k: Tensor, allowed: np.ndarray | Tensor, scale: float | None = None
) -> Tensor:
    """Return dense scores [b, h, s, t] of queries [b, s, h, d] and keys [b, t, g, d], in their
    dtype; -inf where `allowed`, which broadcasts to that shape, is False.
    """
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~torch.as_tensor(allowed, device=q.device), -torch.inf)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: np.ndarray | Tensor,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [b, s, h, e] and lse [b, h, s] through a dense softmax, with gradients by
    autograd.

    sink: [h] or [s, h], scores of an extra key with the value 0. A query that sees no key gives out
    0 and lse -inf.
    """
    scores = logits(q, k, allowed, scale)
    if sink is not None:
        further = sink.expand(scores.shape[2], -1).T[..., None]
        scores = torch.cat([scores, further.expand(len(scores), -1, -1, -1)], -1)
    empty = scores.isneginf().all(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    weights = scores.softmax(-1).masked_fill(empty[..., None], 0.0)[..., : k.shape[1]]
    out = torch.einsum("bhqk,bkhe->bqhe", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out, scores.logsumexp(-1).masked_fill(empty, -torch.inf)


def brute_force(case: Case, allowed: np.ndarray) -> Grads:
    """Return out and gradients in float64, over the pairs that the boolean [n, n] `allowed`
    permits.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in case[:3])
    out, _ = dense(q, k, v, allowed)
    return Grads(out.detach(), *torch.autograd.grad(out, (q, k, v), case.dout.double()))


def on_rank(group, case: Case, plan: Plan, **options) -> tuple[Grads, Counters]:  # type: ignore[no-untyped-def]
    """Run attention on a rank: return out and gradients of its shard, and its counters."""
    rank = group.rank() if group is not None else 0
    dim = 0 if options.get("qkv_format") == "sbhd" else 1
    shard = [plan.layout.shard(x.transpose(0, 1) if dim == 0 else x, rank, dim) for x in case]
    q, k, v = (x.detach().requires_grad_() for x in shard[:3])
    with record() as counters:
        out = ring_attention(q, k, v, group, plan=plan, **options)
        grads = torch.autograd.grad(out, (q, k, v), shard[3])
    return Grads(
        *(x.detach().transpose(0, 1) if dim == 0 else x.detach() for x in (out, *grads))
    ), counters


def whole(layout: Layout, parts: list[tuple[Grads, Counters]]) -> Grads:
    """Return out and gradients of the whole sequence, from the results of `on_rank` in rank
    order.
    """
    return Grads(
        *(
            layout.unshard(list(column), 1)
            for column in zip(*(part[0] for part in parts), strict=True)
        )
    )


def error(x: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the truth."""
    x, truth = x.detach().double(), truth.detach()
    return float((x - truth).norm() / truth.norm())
