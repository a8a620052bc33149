# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The parts that the Triton kernels of merges and of sums share: the table of blocks (see
`cp_ring.ops.segments`) and the launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 4
"""The number of part arguments of a kernel. If there are fewer parts, the last one is given again
and not read.
"""


@triton.jit
def tokens_in_part(entry, count, BLOCK_Q: tl.constexpr):
    """Return the indices [BLOCK_Q] of a block's tokens in a part, and how many of them exist. At
    `entry` are the part's two columns of the table: the position of the first token, and the step
    to the next one, 0 if there is none.
    """
    start, step = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    return start + step * tl.arange(0, BLOCK_Q), tl.where(step == 0, 0, count)


@triton.jit
def load_tokens(
    x,
    at_q,
    at_b,
    at_h,
    count,
    stride_q,
    stride_b,
    stride_h,
    size,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Load the first `count` of the tokens `at_q` of one head in float32 [BLOCK_Q, BLOCK_E]; zeros
    elsewhere.
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (tl.arange(0, BLOCK_Q)[:, None] < count) & (e < size)
    at = x + at_q[:, None] * stride_q + at_b * stride_b + at_h * stride_h + e
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(
    x,
    value,
    at_q,
    at_b,
    at_h,
    count,
    stride_q,
    stride_b,
    stride_h,
    size,
    BLOCK_Q: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store the tokens that `load_tokens` loads, in the dtype of `x`."""
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (tl.arange(0, BLOCK_Q)[:, None] < count) & (e < size)
    tl.store(
        x + at_q[:, None] * stride_q + at_b * stride_b + at_h * stride_h + e, value, mask=inside
    )


def padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return MAX_PARTS tensors whose last dimension is contiguous."""
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in parts]
    return parts + parts[-1:] * (MAX_PARTS - len(parts))


def strides_of(x: Tensor, dim: int) -> tuple[int, int, int]:
    """Return the strides of tokens, batch and heads, if tokens are the dimension `dim`, 0 or 1."""
    first, second, heads, _ = x.stride()
    return (second, first, heads) if dim else (first, second, heads)
