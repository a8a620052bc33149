"""Blocks of sparse attention: some queries of a rank and keys of a hop, all that a tile allows or
those selected, and the products between them. Shapes as in `sparse_loop`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cp_ring.plan.tables import Hop
from cp_ring.plan.tiles import OPEN

BLOCK = 1 << 24
"""Elements of the largest tensor of a block."""

NONE, _LOW = torch.iinfo(torch.int64).min, 0x7FFFFFFF


class Selection(NamedTuple):
    """The keys of each query.

    numbers: int32 [b, s, topk], ascending; a key of a hop has the number of the hop's first one, in
    `first`, and its place in the hop's buffer. What lacks to `topk` has numbers above all keys'.
    widths: of each hop, the most keys that a query selects of it.
    lse: of the indexer's scores [b, s], over the keys of the loss.
    held: keys of the indexer that have arrived, by hop; None where they are not held.
    """

    numbers: Tensor
    first: Mapping[int, int]
    widths: Mapping[int, int]
    lse: Tensor
    held: dict[int, Tensor] | None = None


class Block(NamedTuple):
    """Queries `mine` of this rank, and their keys in a hop's buffer: a slice for all, or for each
    query numbers [b, t, w]. `allowed` are the pairs, bool [b or 1, t, w].
    """

    mine: slice
    at: slice | Tensor
    allowed: Tensor

    def take(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, w, size] of keys [u, b, size]."""
        if isinstance(self.at, slice):
            return keys[self.at].transpose(0, 1).to(dtype)
        return keys.flatten(0, 1)[self._flat(keys)].flatten(0, 1).to(dtype)

    def give(self, total: Tensor, grads: Tensor) -> None:
        """Adds gradients [n, w, size] to those of keys, [u, b, size]."""
        if isinstance(self.at, slice):
            total[self.at] += grads.transpose(0, 1)
        else:
            places = self._flat(total).flatten()
            total.view(-1, total.shape[-1]).index_add_(0, places, grads.flatten(0, 1))

    def _flat(self, keys: Tensor) -> Tensor:
        assert isinstance(self.at, Tensor)
        b = keys.shape[1]
        return self.at * b + torch.arange(b, device=keys.device)[:, None, None]


def seen(hop: Hop, size: int, device: torch.device) -> Iterator[Block]:
    """All pairs of a hop that its tiles allow. `size`: elements of a block for each pair."""
    for q0, q1, k0, k1, lo, hi in hop.tiles:
        step = max(1, BLOCK // (size * (k1 - k0)))
        for start in range(q0, q1, step):
            end = min(start + step, q1)
            first, last = max(k0, start + lo), min(k1, end + hi)
            if first < last:
                of_q = torch.arange(start, end, device=device)[:, None]
                slope = torch.arange(first, last, device=device) - of_q
                allowed = (slope >= max(lo, -OPEN)) & (slope <= min(hi, OPEN))
                yield Block(slice(start, end), slice(first, last), allowed[None])


def chosen(selection: Selection, hop: Hop, size: int) -> Iterator[Block]:
    """The pairs of a hop that queries have selected."""
    numbers, width, first = selection.numbers, selection.widths[hop.index], selection.first
    (b, s, most), begin = numbers.shape, first[hop.index]
    step = max(1, BLOCK // (size * b * width)) if width else s
    for start in range(0, s if width else 0, step):
        mine = slice(start, min(start + step, s))
        of_each = numbers[:, mine].long()
        places = (of_each < begin).sum(-1, keepdim=True) + torch.arange(
            width, device=of_each.device
        )
        at = of_each.gather(-1, places.clamp(max=most - 1)) - begin
        allowed = (places < most) & (at < hop.num_keys)
        yield Block(mine, at.where(allowed, 0), allowed)


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """[b, t, h, w] of queries [b, t, h, d] and keys [n, w, d]."""
    n, w, d = keys.shape
    return (queries.reshape(n, -1, d) @ keys.mT).view(*queries.shape[:3], w)


def of_queries(x: Tensor, keys: Tensor) -> Tensor:
    """[b, t, h, d] of x [b, t, h, w] and keys [n, w, d]."""
    n, w, d = keys.shape
    return (x.reshape(n, -1, w) @ keys).view(*x.shape[:3], d)


def of_keys(x: Tensor, queries: Tensor, n: int) -> Tensor:
    """[n, w, d] of x [b, t, h, w] and queries [b, t, h, d]."""
    return x.reshape(n, -1, x.shape[-1]).mT @ queries.reshape(n, -1, queries.shape[-1])


def ordered(scores: Tensor, positions: Tensor) -> Tensor:
    """Scores as whole numbers in the same order, int64; of equal ones the earlier is larger."""
    bits = (scores.float() + 0.0).view(torch.int32).long()  # no -0.0
    return ((bits ^ ((bits >> 31) & _LOW)) << 32) | (_LOW - positions)


def read(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and positions of `ordered`."""
    bits = numbers >> 32
    scores = (bits ^ ((bits >> 31) & _LOW)).int().view(torch.float32)
    return scores.where(numbers != NONE, -math.inf), _LOW - (numbers & 0xFFFFFFFF)
