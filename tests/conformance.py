"""Checks of what every kernel must do, against attention by autograd in float64.

The test of a new kernel is one line: `conformance.check(kernel, device, dtype)`. It raises
`AssertionError` with the name of the property that does not hold. `PROPERTIES` lists the properties
by name, so that each can be a test of its own.

In a tile, queries and keys are counted from 0. Query i sees key j where lo <= j - i <= hi.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cp_ring.kernels.base import OPEN, AttentionKernel, Packing, VarlenKernel, determinism
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.testing.oracle import dense

HEADS = ((4, 4, 16, 16), (8, 1, 32, 32), (6, 2, 24, 40), (4, 2, 40, 24), (2, 2, 64, 64))
"""(query heads, key/value heads, d, e); those that a kernel rejects are left out."""

RECTANGLES = ((33, 33), (5, 19), (19, 5), (1, 7), (7, 1), (1, 1), (64, 130))
BANDS = (
    (33, 33, -5, OPEN),
    (33, 33, -5, 2),
    (19, 33, -OPEN, 14),
    (33, 19, -14, OPEN),
    (33, 33, -4, 0),
    (9, 33, 0, 24),
    (20, 25, -3, 5),
    (3, 5, -1, OPEN),  # of one hidden pair, in a corner
    (5, 3, -OPEN, 1),
)
DENSE = ((256, 128), (128, 256))
"""Multiples of 128, the sizes of most tiles in training. Some kernels compute them with other
functions than other sizes.
"""

# Norm of the error divided by norm of the truth. It allows for rounding in another order; a wrong
# key gives an error of 0.05.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Absolute error of lse, which is not rounded to the dtype of the inputs.
_LSE_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-3,
}


@dataclass(frozen=True)
class KernelCase:
    """A kernel and the inputs to check it with; `heads` is one of `HEADS`."""

    kernel: AttentionKernel
    device: torch.device
    dtype: torch.dtype
    heads: tuple
    scale: float
    batch: int = 2

    def draw(self, queries, keys, seed=0, strided=False):
        """q, k, v, dout of one tile. `strided` makes them views of tokens-first storage that holds
        NaN around them.
        """
        h, g, d, e = self.heads
        generator = torch.Generator().manual_seed(seed)
        shapes = (queries, h, d), (keys, g, d), (keys, g, e), (queries, h, e)
        drawn = [
            torch.randn(self.batch, *shape, generator=generator, dtype=torch.float64)
            for shape in shapes
        ]
        q, k, v, dout = (x.to(self.device, self.dtype) for x in drawn)
        return (_embed(q), _embed(k), _embed(v), _embed(dout)) if strided else (q, k, v, dout)


def check(kernel, device="cpu", dtype=torch.float32, *, only=None, heads=HEADS):
    """Checks all properties of `kernel`, or `only` one of `PROPERTIES`, on tensors of `dtype` on
    `device`.

    Raises `AssertionError` that names the kernel, the property, the tile and the error.
    """
    device = torch.device(device)
    supported = [x for x in heads if kernel.rejection(device, dtype, x[2], x[3]) is None]
    assert supported, (
        f"{kernel.name} supports none of the head sizes {sorted({x[2:] for x in heads})} in "
        f"{dtype} on {device}"
    )
    for name in PROPERTIES if only is None else [only]:
        for sizes in supported:
            try:
                PROPERTIES[name](KernelCase(kernel, device, dtype, sizes, scale=sizes[2] ** -0.5))
            except AssertionError as error:
                at = f"heads {sizes[0]}:{sizes[1]}, head sizes {sizes[2]} and {sizes[3]}, {dtype}"
                raise AssertionError(f"{kernel.name}, {name}: {error} ({at})") from None


def _full(case):
    for queries, keys in RECTANGLES:
        _check_tile(case, queries, keys, -OPEN, OPEN)


def _causal(case):
    tall = () if case.kernel.capabilities.varlen else ((33, 5), (130, 64))
    for queries, keys in ((1, 1), (33, 33), (64, 64), (130, 130), *tall):
        _check_tile(case, queries, keys, -OPEN, 0)


def _multiples_of_128(case):
    for queries, keys in DENSE:
        _check_tile(case, queries, keys, -OPEN, OPEN)
    for keys in (256, 128):  # of fewer keys in backward, where a rank's own keys are cut
        _check_tile(case, 256, keys, -OPEN, 0)
    _check_merged(case, 128, 256)


def _bands(case):
    for band in BANDS if case.kernel.capabilities.bands else ():
        _check_tile(case, *band)


def _scale(case):
    for scale in (0.03, 1.0):
        _check_tile(replace(case, scale=scale), 33, 33, -OPEN, 0)


def _strided(case):
    """The kernel reads its view and nothing around it."""
    for lo, hi in ((-OPEN, OPEN), (-OPEN, 0)):
        _check_tile(case, 33, 33, lo, hi, strided=True)


def _written(case):
    """Every element of every output is written: fresh memory is NaN."""
    with nan_memory():
        for lo, hi in ((-OPEN, OPEN), (-OPEN, 0)):
            _check_tile(case, 45, 45, lo, hi)
        _varlen(case)


def _merged(case):
    _check_merged(case, 33, 47)


def _check_merged(case, queries, more):
    """Backward of one tile, with out and lse over all keys, gives that tile's exact share of the
    gradients.

    The queries see a causal tile of `queries` keys, and a full tile of `more` keys.
    """
    q, k, v, dout = case.draw(queries, queries)
    more_k, more_v = case.draw(queries, more, seed=1)[1:3]
    sizes = (queries, 0), (more, OPEN)
    allowed = torch.cat([_seen(case, queries, keys, -OPEN, hi) for keys, hi in sizes], 1)
    truth = _truth(q, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1), dout, allowed, case)
    out = truth.out.to(case.dtype)
    lse = truth.lse.to(sum_dtype(case.dtype))
    options = {"lo": -OPEN, "scale": case.scale}
    first = case.kernel.backward(dout, q, k, v, out, lse, hi=0, **options)
    second = case.kernel.backward(dout, q, more_k, more_v, out, lse, hi=OPEN, **options)
    _close("dq of two tiles", first[0].double() + second[0].double(), truth.dq, case)
    for name, a, b, whole in zip(
        ("dk", "dv"), first[1:], second[1:], (truth.dk, truth.dv), strict=True
    ):
        _close(f"{name} of a causal tile among two", a, whole[:, :queries], case)
        _close(f"{name} of a full tile among two", b, whole[:, queries:], case)


def _varlen(case):
    if not case.kernel.capabilities.varlen:
        return
    assert isinstance(case.kernel, VarlenKernel), (
        "capabilities say varlen, but there are no varlen methods"
    )
    sizes = [(7, 7), (1, 1), (40, 40), (3, 3)], [(5, 19), (33, 4), (1, 1), (9, 64)]
    _check_packed(case, sizes[0], -1, 0)
    _check_packed(case, sizes[1], -1, -1)
    if case.kernel.capabilities.bands:
        for left, right in ((5, 0), (-1, 2), (4, -1)):
            _check_packed(case, [*sizes[0], (5, 19), (8, 12)], left, right)


def _repeats(case):
    """Two runs give the same bits, if the kernel promises that and does not reject determinism."""
    with determinism(True):
        rejected = case.kernel.rejection(case.device, case.dtype, *case.heads[2:]) is not None
        if rejected or not case.kernel.capabilities.deterministic:
            return
        drawn = case.draw(130, 130)
        runs = [_run(case, *drawn, -OPEN, 0) for _ in range(2)]
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True)), (
            "two runs differ in their bits"
        )


PROPERTIES = {
    "full rectangles": _full,
    "causal tiles": _causal,
    "multiples of 128": _multiples_of_128,
    "scale": _scale,
    "bands": _bands,
    "strided views": _strided,
    "merged backward": _merged,
    "varlen": _varlen,
    "every element written": _written,
    "deterministic": _repeats,
}


def _seen(case, queries, keys, lo, hi):
    """Which keys each query sees, bool [queries, keys]."""
    offset = torch.arange(keys) - torch.arange(queries)[:, None]
    return ((offset >= lo) & (offset <= hi)).to(case.device)


def _run(case, q, k, v, dout, lo, hi):
    """out, lse, dq, dk and dv of a tile."""
    options = {"lo": lo, "hi": hi, "scale": case.scale}
    out, lse = case.kernel.forward(q, k, v, **options)
    return out, lse, *case.kernel.backward(dout, q, k, v, out, lse, **options)


def _check_tile(case, queries, keys, lo, hi, strided=False):
    drawn = case.draw(queries, keys, strided=strided)
    truth = _truth(*drawn, _seen(case, queries, keys, lo, hi), case)
    _compare(
        f"{queries} x {keys} tile, band {_band(lo, hi)}", _run(case, *drawn, lo, hi), truth, case
    )


def _check_packed(case, sizes, left, right):
    """Checks many tiles in one varlen call; each against its own truth."""
    one = replace(case, batch=1)
    parts = [one.draw(*size, seed=seed) for seed, size in enumerate(sizes)]
    q, k, v, dout = (torch.cat(column, 1)[0] for column in zip(*parts, strict=True))
    queries, keys = ([*column] for column in zip(*sizes, strict=True))
    ends = [
        torch.tensor([0, *accumulate(column)], dtype=torch.int32, device=q.device)
        for column in (queries, keys)
    ]
    packing = Packing(*ends, max(queries), max(keys), left, right)
    out, lse = case.kernel.forward_varlen(q, k, v, packing, case.scale)
    dq, dk, dv = case.kernel.backward_varlen(dout, q, k, v, out, lse, packing, case.scale)
    tiles = zip(
        *(x.split(queries) for x in (out, lse.T, dq)), *(x.split(keys) for x in (dk, dv)),
        strict=True,
    )  # fmt: skip
    for (rows, columns), part, (o, l, *grads) in zip(sizes, parts, tiles, strict=True):
        corner = columns - rows
        lo = corner - left if left >= 0 else -OPEN
        hi = corner + right if right >= 0 else OPEN
        truth = _truth(*part, _seen(one, rows, columns, lo, hi), one)
        what = f"{rows} x {columns} tile of a varlen batch, window ({left}, {right})"
        _compare(what, [x[None] for x in (o, l.T, *grads)], truth, one)


class _Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _truth(q, k, v, dout, allowed, case):
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, allowed, case.scale)
    return _Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def _compare(what, results, truth, case):
    out, lse, *_ = results
    assert lse.dtype in (torch.float32, torch.float64), f"lse of a {what} is {lse.dtype}"
    for name, x, true in zip(truth._fields, results, truth, strict=True):
        assert x.shape == true.shape, (
            f"{name} of a {what} has shape {tuple(x.shape)} instead of {tuple(true.shape)}"
        )
    empty = truth.lse.isneginf()
    assert torch.equal(lse.isneginf(), empty), (
        f"lse of a {what} is -inf for other queries than those that see no key"
    )
    off = float((lse.double() - truth.lse)[~empty].abs().max()) if not empty.all() else 0.0
    assert off <= _LSE_TOLERANCE[case.dtype], f"lse of a {what} is off by {off:.1e}"
    assert not (out.transpose(1, 2)[empty] != 0).any(), (
        f"out of a {what} is not 0 where a query sees no key"
    )
    for name, x, true in zip(truth._fields, results, truth, strict=True):
        if name != "lse":
            _close(f"{name} of a {what}", x, true, case)


def _close(what, x, truth, case):
    assert x.isfinite().all(), f"{what} has NaN or infinity"
    # Where a query sees one key, gradients of scores are 0. Then the error is rounding, and is
    # compared with 1.
    floor = 0.1 * math.sqrt(truth.numel())
    off = float((x.double() - truth).norm() / truth.norm().clamp(min=floor))
    assert off <= _TOLERANCE[case.dtype], (
        f"{what} is off by {off:.1e}, more than {_TOLERANCE[case.dtype]:.0e}"
    )


def _embed(x):
    """The same values as a view of a larger [s, b, h, d] tensor that is NaN elsewhere."""
    b, s, h, d = x.shape
    around = torch.full((s + 9, b, h, d), math.nan, dtype=x.dtype, device=x.device)
    around[4 : 4 + s] = x.transpose(0, 1)
    return around[4 : 4 + s].transpose(0, 1)


def _band(lo, hi):
    return f"({'-' if lo == -OPEN else lo}, {'-' if hi == OPEN else hi})"


@contextmanager
def nan_memory():
    """While this lasts, torch fills new memory with NaN instead of leaving it uninitialized, which
    is what it does where its algorithms are to be deterministic.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
