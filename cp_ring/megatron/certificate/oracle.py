"""What the flags declare, from first principles: dense masks, attention in float64. Nothing of cp_ring's plan has a part in it.

Shapes: s tokens of some ranks, n of a whole row, h query and g key/value heads, d and e head sizes of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Spans = Sequence[tuple[int, int]]


def declared_mask(queries: Tensor, n: int, spans: Spans, window: tuple[int, int]) -> Tensor:
    """Which of the n keys of a row the tokens at `queries` [s] may see, bool [s, n]: those of their span [start, end), not after
    themselves and at most window[0] before (-1: any). Tokens outside all spans are padding, which neither sees nor is seen."""
    keys = torch.arange(n, device=queries.device)
    owner = torch.full((n,), -1, device=queries.device)
    for number, (start, end) in enumerate(spans):
        owner[start:end] = number
    back = queries[:, None] - keys
    allowed = (back >= 0) & (owner[queries][:, None] == owner) & (owner[queries][:, None] >= 0)
    return allowed & (back <= window[0]) if window[0] >= 0 else allowed


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, sink: Tensor | None = None) -> Tensor:
    """q [s, h, d], k [n, g, d], v [n, g, e], allowed bool [s, n], sink [h]: the attention [s, h, e] in float64; rows that see
    nothing are zero."""
    q, k, v = (x.double() for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = torch.einsum("shd,nhd->hsn", q, k) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    extra = torch.full((q.shape[1], q.shape[0], 1), -math.inf, dtype=scores.dtype, device=q.device)
    if sink is not None:
        extra = sink.double()[:, None, None].expand_as(extra)
    dead = ~allowed.any(1)[:, None]
    everything = torch.cat([scores, extra], -1).masked_fill(dead, 0.0)
    weight = everything.softmax(-1)[..., :-1].masked_fill(dead, 0.0)
    return torch.einsum("hsn,nhe->she", weight, v)


class DenseAttention(torch.nn.Module):
    """Core attention of a whole sequence in float64, in place of `ring` (a layer's RingDotProductAttention), whose parameter it
    shares; takes what Megatron gives to core attention. `spans` are the documents of each batch row."""

    def __init__(self, ring: torch.nn.Module, window: tuple[int, int], scale: float | None, spans: Sequence[Spans]):
        super().__init__()
        self.softmax_offset = ring.softmax_offset
        self.window, self.spans = window, spans
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        """query [n, b, h, d], key [n, b, g, d], value [n, b, g, e] to [n, b, h * e]."""
        n = query.shape[0]
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        rows = []
        for row, spans in enumerate(self.spans):
            allowed = declared_mask(torch.arange(n, device=query.device), n, spans, self.window)
            rows.append(attend(query[:, row], key[:, row], value[:, row], allowed, scale, self.softmax_offset))
        return torch.stack(rows, 1).flatten(2).to(query.dtype)
