# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""Sums of gradients in Triton: up to three tensors in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_Q = 16
_PAIRS = 3


@triton.jit
def _one(
    target, source, block, tokens, b, h, d, target_q, target_b, target_h, source_q, source_b, source_h, source_d,
    MOVE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q tokens of one head of one pair."""
    q = block.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    at_h, at_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    e = tl.arange(0, BLOCK_D)[None, :]
    # Conditions on scalars and on blocks stay apart: with both in one mask, Triton 3.9's interpreter gets its type wrong.
    inside = (q < tl.where((at_h < h) & (at_b < b), tokens, 0)) & (e < d)
    target_at = target + q * target_q + at_b * target_b + at_h * target_h + e
    source_at = source + q * source_q + at_b * source_b + at_h * source_h + e * source_d
    value = tl.load(source_at, mask=inside, other=0.0).to(tl.float32)
    if MOVE:
        tl.store(source_at, tl.zeros_like(value), mask=inside)
    else:
        value += tl.load(target_at, mask=inside, other=0.0)
    tl.store(target_at, value, mask=inside)


# The numbers of tokens. Triton would compile again for those that are 1 or divisible by 16.
_VARYING = ["tokens0", "tokens1", "tokens2"]


@triton.jit(do_not_specialize=_VARYING)
def _sum(
    target0, source0, tokens0, b0, h0, d0, tq0, tb0, th0, sq0, sb0, sh0, sd0,
    target1, source1, tokens1, b1, h1, d1, tq1, tb1, th1, sq1, sb1, sh1, sd1,
    target2, source2, tokens2, b2, h2, d2, tq2, tb2, th2, sq2, sb2, sh2, sd2,
    MOVE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first programs work on pair 0, the next ones on pair 1, then on pair 2."""
    block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(tokens0, BLOCK_Q), tl.cdiv(tokens1, BLOCK_Q)
    if block < blocks0:
        _one(target0, source0, block, tokens0, b0, h0, d0, tq0, tb0, th0, sq0, sb0, sh0, sd0, MOVE, BLOCK_Q, BLOCK_D)
    elif block < blocks0 + blocks1:
        block -= blocks0
        _one(target1, source1, block, tokens1, b1, h1, d1, tq1, tb1, th1, sq1, sb1, sh1, sd1, MOVE, BLOCK_Q, BLOCK_D)
    else:
        block -= blocks0 + blocks1
        _one(target2, source2, block, tokens2, b2, h2, d2, tq2, tb2, th2, sq2, sb2, sh2, sd2, MOVE, BLOCK_Q, BLOCK_D)


def sum_(pairs: Sequence[tuple[Tensor, Tensor]], move: bool) -> None:
    """As `cp_ring.ops.sums.add_`, or as `move_` if `move`: a kernel for every three pairs, without empty tensors."""
    for start in range(0, len(pairs), _PAIRS):
        some = list(pairs[start : start + _PAIRS])
        tokens = [target.shape[0] for target, _ in some] + [0] * (_PAIRS - len(some))
        some += [some[0]] * (_PAIRS - len(some))
        values = [
            value
            for (target, source), count in zip(some, tokens, strict=True)
            for value in (target, source, count, *target.shape[1:], *target.stride()[:3], *source.stride())
        ]
        b, h, d = (max(target.shape[i] for target, _ in some) for i in (1, 2, 3))
        grid = (sum(triton.cdiv(count, _BLOCK_Q) for count in tokens), h, b)
        _sum[grid](*values, MOVE=move, BLOCK_Q=_BLOCK_Q, BLOCK_D=triton.next_power_of_2(d))
