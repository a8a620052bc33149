"""Position-dependent attention, dropout and ALiBi: identical for any number of ranks, layout,
route, schedule and Ulysses degree.

Whether a weight is kept is a function of a key, the head, the batch row, and the positions of query
and key in the batch row: a counter-based generator (Philox 4x32-10; Salmon et al., 2011,
https://doi.org/10.1145/2063384.2063405) computes it wherever the pair is computed, in forward and
again in backward. Positions travel with the tokens, as whole numbers in columns behind the head
size of queries and keys. So plans, messages and the exchange of heads need not know of them.

ALiBi (Press et al., https://arxiv.org/abs/2108.12409) subtracts slope * |query - key| from a score,
with a slope for each query head. The positions are those of dropout, so it goes the same way. No
library kernel can stand in: flash-attn measures distances from the bottom-right corner of what it
is called with, which of a tile below the diagonal is a distance of the other sign.

Shapes: s tokens of this rank, b batch rows, h query heads, g key/value heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_ring.kernels.base import AttentionKernel, Capabilities, SoftcapKernel, dropout_dtype

# position: 4 bytes; of queries also the head and the batch row: 2 bytes each. bfloat16 has every
# byte exactly.
COLUMNS = 8
_WORD = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_BLOCK = 1 << 21  # scores that are held at a time


@dataclass(eq=False)
class Bias:
    """What is added to scores: values [b or 1, h or 1, s or 1, n] of this rank's queries, at
    `position` [s], ascending, to all keys. `gradient` sums that of a backward pass.
    """

    values: Tensor
    position: Tensor
    gradient: Tensor | None = None

    def of(self, q: Tensor, k: Tensor) -> Tensor:
        """Of marked queries and keys, [b or 1, h or 1, q or 1, k]."""
        return self.values[self._places(q, k)]

    def add(self, q: Tensor, k: Tensor, scores: Tensor) -> None:
        """Adds the gradient of their scores, [b, h, q, k]."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.values, dtype=scores.dtype)
        shared = [dim for dim in range(3) if self.values.shape[dim] == 1]
        self.gradient[self._places(q, k)] += scores.sum(shared, keepdim=True) if shared else scores

    def _places(self, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        queries = torch.searchsorted(self.position, _positions(q)[0])
        return ..., queries[:, None] if self.values.shape[2] > 1 else _FIRST, _positions(k)[0]


_FIRST = torch.zeros(1, 1, dtype=torch.int64)


class _WithBias(torch.autograd.Function):
    """q, and in backward the gradient of its bias, which is whole when that of q is."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, values: Tensor, bias: Bias) -> Tensor:
        ctx.bias = bias
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> tuple[Tensor, Tensor, None]:
        bias: Bias = ctx.bias
        gradient, bias.gradient = bias.gradient, None
        gradient = torch.zeros_like(bias.values) if gradient is None else gradient
        return dq, gradient.to(bias.values.dtype), None


@dataclass(frozen=True)
class Dropout:
    """Dropout and biases of one call of attention.

    p: the probability with which a weight is dropped, 0 for none; others are divided by 1 - p.
    key: 64 bits that differ from call to call: of a seed, a layer and a step.
    position: where this rank's tokens are in their batch rows, int64 [s] or [s, b].
    first_head: number of this rank's first query head in the whole layer.
    slopes: ALiBi's slope of each query head from `first_head` on; none without it.
    key_position: `position` of its keys, where they are not those of the queries' tokens.
    bias: what is added to scores.
    """

    columns: ClassVar[int] = COLUMNS
    p: float
    key: int
    position: Tensor
    first_head: int = 0
    slopes: tuple[float, ...] = ()
    key_position: Tensor | None = None
    bias: Bias | None = None

    def mark(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [s, b, h, d] and k [s, b, g, d] with `COLUMNS` more columns, which say where a token
        is.
        """
        if self.bias is not None:
            q = _WithBias.apply(q, self.bias.values, self.bias)
        where = _where(self.position, q)
        of_keys = where if self.key_position is None else _where(self.key_position, k)
        heads = _bytes(
            torch.arange(self.first_head, self.first_head + q.shape[2], device=q.device), 2
        )
        batch_row = _bytes(torch.arange(q.shape[1], device=q.device), 2)[:, None]
        of_q = [where, heads, batch_row]  # each to [s, b, h, bytes]
        marked = torch.cat([q, *(x.expand(*q.shape[:3], -1).to(q.dtype) for x in of_q)], -1)
        return marked, torch.cat(
            [
                k,
                of_keys.expand(*k.shape[:3], -1).to(k.dtype),
                k.new_zeros(*k.shape[:3], COLUMNS - 4),
            ],
            -1,
        )

    def kernel(self, kernel: AttentionKernel) -> AttentionKernel:
        """Wraps `kernel`, which has a `dropout_dtype`, so that it reads the positions that `mark`
        packed into q and k.
        """
        dtype = dropout_dtype(kernel)
        assert dtype is not None, f"{kernel.name} has no dropout"
        softcap = getattr(kernel, "softcap", 0.0)
        return DropoutKernel(
            kernel.name, dtype, self.p, self.key, self.slopes, self.first_head, softcap,
            bias=self.bias,
        )  # fmt: skip


def _where(position: Tensor, x: Tensor) -> Tensor:
    """The bytes of the positions of the tokens of x, [s, b, 1, 4]."""
    position = position.to(x.device)
    position = position if position.dim() == 2 else position[:, None].expand(-1, x.shape[1])
    return _bytes(position, 4)[:, :, None]


def with_softcap(kernel: AttentionKernel, softcap: float) -> AttentionKernel | str:
    """`kernel` with capped scores, or why there is none, in one line. Kernels that support dropout
    have it in plain torch.
    """
    if isinstance(kernel, SoftcapKernel):
        return kernel.with_softcap(softcap)
    dtype = dropout_dtype(kernel)
    if dtype is None:
        return "has no softcap"
    return DropoutKernel(kernel.name, dtype, softcap=softcap, columns=0)


@dataclass
class DropoutKernel:
    """Follows `AttentionKernel` in plain torch: in `dropout_dtype`, or that of the tensors if it is
    wider.

    The last `columns` of queries and keys are those of `Dropout.mark`. With `softcap` the scores
    are softcap * tanh(score / softcap), to which ALiBi and a bias are added.
    """

    name: str
    dropout_dtype: torch.dtype
    p: float = 0.0
    key: int = 0
    slopes: tuple[float, ...] = ()
    first_head: int = 0
    softcap: float = 0.0
    columns: int = COLUMNS
    bias: Bias | None = None

    capabilities = Capabilities(bands=True, deterministic=True)

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionKernel.forward`; lse is that without dropout."""
        parts = []
        v_heads = self._heads(v, q.shape[2])
        for queries in self._blocks(q, k):
            scores, _ = self._scores(q[:, queries], k, lo, hi, scale, queries.start)
            lse = scores.logsumexp(-1)
            weights = _probabilities(scores, lse) * self._kept(q[:, queries], k)
            parts.append(((weights @ v_heads).transpose(1, 2), lse))
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `AttentionKernel.backward`; the columns of `Dropout.mark` get zero gradients."""
        heads, groups = q.shape[2], k.shape[2]
        k_heads, v_heads = self._heads(self._unmarked(k), heads), self._heads(v, heads)
        dk, dv, dqs = torch.zeros_like(k_heads), torch.zeros_like(v_heads), []
        for queries in self._blocks(q, k):
            q_heads = self._heads(self._unmarked(q[:, queries]), heads)
            dout_heads, out_heads = (self._heads(x[:, queries], heads) for x in (dout, out))
            scores, slope = self._scores(q[:, queries], k, lo, hi, scale, queries.start)
            p = _probabilities(scores, lse[:, :, queries].to(scores.dtype))
            kept = self._kept(q[:, queries], k)
            dp = dout_heads @ v_heads.mT * kept
            ds = p * (dp - (dout_heads * out_heads).sum(-1, keepdim=True))
            if self.bias is not None:
                self.bias.add(q[:, queries], k, ds)
            ds = ds * slope * scale
            dqs.append(ds @ k_heads)
            dk += ds.mT @ q_heads
            dv += (p * kept).mT @ dout_heads
        dq = torch.cat(dqs, 2).transpose(1, 2)
        dq, dk = (pad(x, (0, self.columns)) for x in (dq, _sum_groups(dk, groups)))
        return dq, dk, _sum_groups(dv, groups)

    def _unmarked(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] - self.columns]

    def _blocks(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        """Ranges of the queries, so that `_BLOCK` scores are held at a time."""
        size = max(1, _BLOCK // (q.shape[0] * q.shape[2] * k.shape[1]))
        return (slice(start, min(start + size, q.shape[1])) for start in range(0, q.shape[1], size))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, g, d] to [b, heads, s, d] in the dtype of the sums, each key/value head repeated
        for its query heads.
        """
        x = x.to(torch.promote_types(x.dtype, self.dropout_dtype)).transpose(1, 2)
        return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)

    def _scores(
        self, q: Tensor, k: Tensor, lo: int, hi: int, scale: float, first: int
    ) -> tuple[Tensor, Tensor | float]:
        """[b, h, q, k], -inf where the band from `lo` to `hi` hides a key; and the slope of the
        softcap. `first` is the number of the first query.
        """
        q_heads, k_heads = (self._heads(self._unmarked(x), q.shape[2]) for x in (q, k))
        slope: Tensor | float = 1.0
        scores = q_heads @ k_heads.mT * scale
        if self.softcap:
            capped = (scores / self.softcap).tanh()
            scores, slope = capped * self.softcap, 1 - capped.square()
        offset = (
            torch.arange(k.shape[1], device=q.device)
            - torch.arange(first, first + q.shape[1], device=q.device)[:, None]
        )
        if self.slopes:
            scores = scores - self._distances(q, k).to(scores.dtype)
        if self.bias is not None:
            scores = scores + self.bias.of(q, k).to(scores.dtype)
        return scores.masked_fill((offset < lo) | (offset > hi), -math.inf), slope

    def _distances(self, q: Tensor, k: Tensor) -> Tensor:
        """ALiBi's slope * distance, float64 [b, h, q, k]. A slope belongs to a head, wherever heads
        were exchanged to.
        """
        heads = _number(q[0, 0, :, -COLUMNS + 4 : -COLUMNS + 6]) - self.first_head
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=q.device)[heads]
        distance = (_positions(q)[:, :, None] - _positions(k)[:, None]).abs()
        return slopes[:, None, None] * distance[:, None]

    def _kept(self, q: Tensor, k: Tensor) -> Tensor | float:
        """[b, h, q, k]: 1 / (1 - p) where a weight is kept, else 0. 1 without dropout."""
        if not self.p:
            return 1.0
        marks = q[..., -COLUMNS:]
        heads = _number(marks[0, 0, :, 4:6]).tolist()
        kept = keep(
            self.key, self.p, heads, _number(marks[:, :, 0, 6:8]), _positions(q), _positions(k)
        )
        return kept.to(torch.promote_types(q.dtype, self.dropout_dtype)) / (1 - self.p)


def keep(
    key: int, p: float, heads: list[int], batch_row: Tensor, query: Tensor, keys: Tensor
) -> Tensor:
    """Which weights are kept, bool [b, len(heads), q, k].

    batch_row, query: the batch row of each query and its position there, int64 [b, q].
    keys: the position of each key in the batch row, int64 [b, k].

    The four words of a block of Philox are those of four neighboring heads.
    """
    blocks: dict[int, tuple[Tensor, ...]] = {}
    limit = round(p * 2**32)
    for number in sorted({head // 4 for head in heads}):
        counter = (
            keys[:, None],
            query[:, :, None],
            batch_row[:, :, None],
            torch.full_like(batch_row[:, :1, None], number),
        )
        blocks[number] = philox(counter, key)
    return torch.stack([blocks[head // 4][head % 4] >= limit for head in heads], 1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32: four 32-bit words of a counter of four, under a key of 64 bits; each an int64
    tensor, broadcast together.
    """
    a, b, c, d = counter
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(rounds):
        # the 64 bits of a product are right, whatever their sign
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = (second >> 32 & _WORD) ^ b ^ low
        b = second & _WORD
        c = (first >> 32 & _WORD) ^ d ^ high
        d = first & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    a, b, c, d = torch.broadcast_tensors(a, b, c, d)
    return a, b, c, d


def mixed(*numbers: int) -> int:
    """64 bits of several numbers of up to 64 bits, such as seed, layer and step: a key for
    `Dropout`.
    """
    key = 0
    for number in numbers:
        words = (number & _WORD, number >> 32 & _WORD, 0, 0)
        low, high, _, _ = philox(tuple(torch.tensor(word) for word in words), key)  # type: ignore[arg-type]
        key = int(low) | int(high) << 32
    return key


def _bytes(numbers: Tensor, count: int) -> Tensor:
    """The `count` lowest bytes of whole numbers, in a new last dimension."""
    return numbers[..., None] >> torch.arange(0, 8 * count, 8, device=numbers.device) & 0xFF


def _number(parts: Tensor) -> Tensor:
    """The inverse of `_bytes`, of any dtype that has bytes exactly; int64."""
    return (
        parts.to(torch.int64) << torch.arange(0, 8 * parts.shape[-1], 8, device=parts.device)
    ).sum(-1)


def _positions(marked: Tensor) -> Tensor:
    """The positions of queries or keys in their batch rows, int64 [b, s]."""
    return _number(marked[:, :, 0, -COLUMNS : -COLUMNS + 4])


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """[b, h, s, d] to [b, s, groups, d]: sums over the query heads of each key/value head."""
    return x.unflatten(1, (groups, -1)).sum(2).transpose(1, 2)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    lse = lse[..., None]
    return torch.where(lse == -math.inf, 0.0, (scores - lse).exp())
