"""The oracle: attention of any tile in float64 by plain matrix products; any device, any head sizes, O(rows * columns) memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cp_ring.plan.lower import Capabilities


class ReferenceKernel:
    """Follows `AttentionKernel`; everything is computed and returned in float64."""

    name = "reference"
    capabilities = Capabilities(bands=True)

    def refusal(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        return None if dtype.is_floating_point else f"reads floating point, not {dtype}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> tuple[Tensor, Tensor]:
        scores, v_heads = _scores(q, k, lo, hi, scale), _heads(v, q.shape[2])
        lse = scores.logsumexp(-1)
        out = _probabilities(scores, lse) @ v_heads
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[2]
        q_heads, k_heads, v_heads = (_heads(x, heads) for x in (q, k, v))
        dout_heads, out_heads = _heads(dout, heads), _heads(out, heads)
        p = _probabilities(_scores(q, k, lo, hi, scale), lse.double())
        dp = dout_heads @ v_heads.mT
        ds = p * (dp - (dout_heads * out_heads).sum(-1, keepdim=True)) * scale
        dq, dk, dv = ds @ k_heads, ds.mT @ q_heads, p.mT @ dout_heads
        return dq.transpose(1, 2), _sum_groups(dk, k.shape[2]), _sum_groups(dv, v.shape[2])


def _heads(x: Tensor, heads: int) -> Tensor:
    """[b, s, g, d] to float64 [b, heads, s, d], each key/value head repeated for its query heads."""
    x = x.double().transpose(1, 2)
    return x.repeat_interleave(heads // x.shape[1], 1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """[b, h, s, d] to [b, s, groups, d]: the query heads of one key/value head added."""
    return x.unflatten(1, (groups, -1)).sum(2).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, lo: int, hi: int, scale: float) -> Tensor:
    heads = q.shape[2]
    scores = _heads(q, heads) @ _heads(k, heads).mT * scale
    rows, columns = scores.shape[-2:]
    offset = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
    return scores.masked_fill((offset < lo) | (offset > hi), -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse[..., None]
    return torch.where(lse == -math.inf, 0.0, (scores - lse).exp())


KERNEL = ReferenceKernel()
