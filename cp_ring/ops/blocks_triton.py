# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
"""The parts that the Triton kernels of merges and of sums share: the blocks of tokens (see
`cp_ring.ops.segments`), and how they are read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cp_ring.runtime import RUNTIME

MAX_PARTS = 4
"""The most parts of an update, as `cp_ring.plan.updates` makes them."""


class Tokens(NamedTuple):
    """A tensor [.., size] whose last dimension is contiguous, with its strides of tokens, batch and
    heads, in elements.
    """

    x: Tensor
    q: int
    b: int
    h: int
    size: int


def tokens_of(x: Tensor, dim: int) -> Tokens:
    """Return x as kernels take it. Its tokens are dimension `dim`, 0 or 1, its heads 2."""
    strides = x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    return Tokens(x, strides[dim], strides[1 - dim], strides[2], x.shape[-1])


def block_size(size: int) -> int:
    """Return the least power of two that is not below `size`. Triton's own function takes the host
    longer than a launch.
    """
    return 1 << (size - 1).bit_length()


_compiled: dict[tuple[Any, ...], Any] = RUNTIME.of_process({})


def launch(
    function: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    tokens: Sequence[Tokens],
    others: Sequence[Tensor],
    numbers: int = 0,
    **constants: Any,
) -> None:
    """Launch a Triton function with `args` and `constants`, in its order. Among the arguments are
    `tokens` and `others`, and as the last one the only number that is specialized; no other one is
    above `numbers`.

    Triton looks at every argument to find the compiled kernel, which takes the host longer than the
    launch. If all addresses, strides and sizes are divisible by 16, it finds the same kernel for
    the same dtypes and constants, which is then launched at once.
    """
    bits, kind = numbers & -16, [id(function), others[0].device, args[-1], *constants.values()]
    for x, q, b, h, size in tokens:
        bits |= x.data_ptr() & 15 | q | b | h | size
        kind.append(x.dtype)
    for x in others:
        bits |= x.data_ptr() & 15
        kind.append(x.dtype)
    even, key = not bits & 15 and bits < 2**31, tuple(kind)
    if even and (known := _compiled.get(key)):
        known[grid](*args, *constants.values())
        return
    # To have few registers ptxas would spill: on sm_80 those of a merge, on sm_100 those of a sum
    # of three parts. A limit of all lets it take what it needs.
    compiled = function[grid](*args, **constants, maxnreg=255)
    if even and compiled:  # Triton's interpreter has none
        _compiled[key] = compiled


@triton.jit
def block_of(table, heads, PARTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return the entry of this program's block in the table, its batch row and head, its number of
    tokens and their places, how many of them are stored, and how many are then complete.
    """
    # Neighboring programs take the heads of one block, whose tokens lie side by side in memory.
    entry = table + tl.program_id(0) // heads * (4 + 2 * PARTS)
    h, b = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(1).to(tl.int64)
    start, end = tl.load(entry), tl.load(entry + 1)
    first, last = tl.load(entry + 2), tl.load(entry + 3)
    count, at = end - start, start.to(tl.int64) + tl.arange(0, BLOCK_Q)
    return entry + 4, b, h, count, at, tl.where(first == 1, 0, count), tl.where(last == 1, count, 0)


@triton.jit
def places_in_part(entry, count, BLOCK_Q: tl.constexpr):
    """Return the places [BLOCK_Q] of a block's tokens in a part, and how many of them exist. At
    `entry` are the part's two columns of the table: the place of the first token, and the step to
    the next one, 0 if there is none.
    """
    start, step = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    return start + step * tl.arange(0, BLOCK_Q), tl.where(step == 0, 0, count)


@triton.jit
def load_tokens(tokens, at, b, h, count, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load the first `count` of the tokens `at` of one head in float32 [BLOCK_Q, BLOCK_E]; zeros
    elsewhere.
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (tl.arange(0, BLOCK_Q)[:, None] < count) & (e < tokens.size)
    place = at[:, None] * tokens.q + b * tokens.b + h * tokens.h + e
    return tl.load(tokens.x + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(tokens, value, at, b, h, count, BLOCK_Q: tl.constexpr, BLOCK_E: tl.constexpr):
    """Store the tokens that `load_tokens` loads, in the dtype of the tensor."""
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (tl.arange(0, BLOCK_Q)[:, None] < count) & (e < tokens.size)
    place = at[:, None] * tokens.q + b * tokens.b + h * tokens.h + e
    tl.store(tokens.x + place, value, mask=inside)
