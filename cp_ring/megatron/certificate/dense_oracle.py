"""Computes the attention that the flags declare, with dense masks in float64. Shares no code with
cp_ring's plans.

Shapes: s queries, n keys, b batch rows, h query and g key/value heads, d and e head sizes of keys
and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_ring.plan.mask import Mask


@dataclass(frozen=True)
class MaskRule:
    """The declared mask of a batch row, as a rule for pairs of tokens.

    Attributes:
        pieces: (q0, q1, k0, k1, low, high): queries [q0, q1) see keys [k0, k1) that lie between low
            and high tokens behind them. A pair is visible if it is in one of the pieces.
        positions: the position of each token, int64 [n].
        last: True for tokens without a next token in their sequence, bool [n].
    """

    pieces: Sequence[Any]
    positions: Tensor
    last: Tensor

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return which pairs are visible, bool; both are int64 indices in the batch row on the CPU,
        of shapes that broadcast.
        """
        seen = (query < 0) & (key < 0)
        for q0, q1, k0, k1, low, high in self.pieces:
            inside = (query >= q0) & (query < q1) & (key >= k0) & (key < k1)
            seen |= inside & (key - query >= low) & (key - query <= high)
        return seen


def document_rule(n: int, spans: Sequence[tuple[int, int]]) -> MaskRule:
    """Return the rule in which tokens see the earlier tokens of their own document [start, end).
    Tokens outside all documents are padding, which neither sees nor is seen.
    """
    position, last = torch.arange(n), torch.ones(n, dtype=torch.bool)
    for start, end in spans:
        position[start:end] -= start
        last[start : end - 1] = False
    return MaskRule([(*span, *span, -n, 0) for span in spans], position, last)


def declared_rule(mask: Mask) -> MaskRule:
    """Return the rule of a mask that a batch declares."""
    return MaskRule(
        list(mask.pieces), torch.from_numpy(mask.positions), torch.from_numpy(mask.last)
    )


def allowed_pairs(
    rules: Sequence[MaskRule], queries: Tensor, keys: Tensor, window: tuple[int, int]
) -> Tensor:
    """Return which keys each query may see, bool [b, s, n]; queries [b, s] and keys [b, n] are
    indices in the batch rows of `rules`.

    window: how many earlier and later positions a query sees; -1 means any number. It limits
        earlier keys only.
    """
    found = []
    for rule, query, key in zip(rules, queries.cpu()[..., None], keys.cpu()[:, None], strict=True):
        allowed = rule.sees(query, key)
        if window[0] >= 0:
            allowed &= rule.positions[query] - rule.positions[key] <= window[0]
        found.append(allowed)
    return torch.stack(found).to(queries.device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute attention in float64, [b, s, h, e]; zero for a query that sees no key.

    q [b, s, h, d], k [b, n, g, d], v [b, n, g, e], allowed bool [b, s, n], sink [h].
    """
    q, k, v = (x.double() for x in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    allowed = allowed[:, None]
    blind = ~allowed.any(3, keepdim=True)
    scores = torch.einsum("bshd,bnhd->bhsn", q, k) * scale
    scores = scores.masked_fill(~(allowed | blind), -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink.double()[:, None, None])
    weight = (scores - total).exp().masked_fill(blind, 0.0)
    return torch.einsum("bhsn,bnhe->bshe", weight, v)


def attend_whole_rows(
    rules: Sequence[MaskRule],
    window: tuple[int, int],
    scale: float,
    sink: Tensor | None,
    *qkv: Tensor,
    **named: object,
) -> Tensor:
    """Attend in place of core attention, with what Megatron gives it: query [n, b, h, d], key
    [n, b, g, d] and value [n, b, g, e], without b for packed documents. `rules` holds the mask rule
    of each batch row. Return [n, b, h * e] or [n, h * e], in the dtype of the query.
    """
    query = qkv[0]
    q, k, v = (x.view(len(x), len(rules), *x.shape[-2:]).transpose(0, 1) for x in qkv[:3])
    places = torch.arange(len(query), device=query.device).expand(len(rules), -1)
    out = attend(q, k, v, allowed_pairs(rules, places, places, window), scale, sink)
    return out.transpose(0, 1).reshape(*query.shape[:-2], -1).to(query.dtype)
