"""The oracle: attention of any tile in float64 by plain matrix products, on any device and for any
head sizes. It takes O(queries * keys) memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from cp_ring.kernels.base import OPEN, Capabilities, Gradients, OutLse, Packing


class ReferenceKernel:
    """An `AttentionKernel` that computes and returns everything in float64."""

    name = "reference"
    capabilities = Capabilities(bands=True, varlen=True, deterministic=True, slow=True)

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        return None if dtype.is_floating_point else f"reads floating point, not {dtype}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        scores, v_heads = _scores(q, k, lo, hi, scale), _heads(v, q.shape[2])
        lse = scores.logsumexp(-1)
        out = _probabilities(scores, lse) @ v_heads
        return out.transpose(1, 2), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        lo: int,
        hi: int,
        scale: float,
    ) -> Gradients:
        heads = q.shape[2]
        q_heads, k_heads, v_heads = (_heads(x, heads) for x in (q, k, v))
        dout_heads, out_heads = _heads(dout, heads), _heads(out, heads)
        p = _probabilities(_scores(q, k, lo, hi, scale), lse.double())
        dp = dout_heads @ v_heads.mT
        ds = p * (dp - (dout_heads * out_heads).sum(-1, keepdim=True)) * scale
        dq, dk, dv = ds @ k_heads, ds.mT @ q_heads, p.mT @ dout_heads
        return dq.transpose(1, 2), _sum_groups(dk, k.shape[2]), _sum_groups(dv, v.shape[2])

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> OutLse:
        parts = [
            self.forward(q[None, queries], k[None, keys], v[None, keys], lo=lo, hi=hi, scale=scale)
            for queries, keys, lo, hi in _tiles(packing)
        ]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def backward_varlen(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packing: Packing,
        scale: float,
    ) -> Gradients:
        parts = []
        for queries, keys, lo, hi in _tiles(packing):
            do, qs, o = (x[None, queries] for x in (dout, q, out))
            ks, vs = k[None, keys], v[None, keys]
            parts.append(
                self.backward(do, qs, ks, vs, o, lse[None, :, queries], lo=lo, hi=hi, scale=scale)
            )
        dq, dk, dv = (torch.cat(grads, 1)[0] for grads in zip(*parts, strict=True))
        return dq, dk, dv


def _tiles(packing: Packing) -> Iterator[tuple[slice, slice, int, int]]:
    """Yield queries, keys and top-left band of each packed tile. This waits for the device."""
    ends_q, ends_k = packing.cu_q.tolist(), packing.cu_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        corner = (k1 - k0) - (q1 - q0)
        lo = -OPEN if packing.left < 0 else corner - packing.left
        yield (
            slice(q0, q1),
            slice(k0, k1),
            lo,
            OPEN if packing.right < 0 else corner + packing.right,
        )


def _heads(x: Tensor, heads: int) -> Tensor:
    """Expand [b, s, g, d] to float64 [b, heads, s, d]: each key/value head once for each query
    head.
    """
    x = x.double().transpose(1, 2)
    return x.repeat_interleave(heads // x.shape[1], 1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum [b, h, s, d] over the query heads of each key/value head: [b, s, groups, d]."""
    return x.unflatten(1, (groups, -1)).sum(2).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, lo: int, hi: int, scale: float) -> Tensor:
    heads = q.shape[2]
    scores = _heads(q, heads) @ _heads(k, heads).mT * scale
    queries, keys = scores.shape[-2:]
    offset = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None]
    return scores.masked_fill((offset < lo) | (offset > hi), -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse[..., None]
    return torch.where(lse == -math.inf, 0.0, (scores - lse).exp())


KERNEL = ReferenceKernel()
