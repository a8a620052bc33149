"""What every kernel promises, checked against attention by autograd in float64.

A new kernel's test is one line: `conformance.check(kernel, device, dtype)`; it raises `AssertionError` with the property
that does not hold. `PROPERTIES` lists them by name, for a test each.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from cp_ring.kernels.base import OPEN, AttentionKernel, Packing, VarlenKernel, determinism

HEADS = ((4, 4, 16, 16), (8, 1, 32, 32), (6, 2, 24, 40), (4, 2, 40, 24), (2, 2, 64, 64))
"""(query heads, key/value heads, d, e); those that a kernel refuses are left out."""

RECTANGLES = ((33, 33), (5, 19), (19, 5), (1, 7), (7, 1), (1, 1), (64, 130))
BANDS = (
    (33, 33, -5, OPEN),
    (33, 33, -5, 2),
    (19, 33, -OPEN, 14),
    (33, 19, -14, OPEN),
    (33, 33, -4, 0),
    (9, 33, 0, 24),
    (20, 25, -3, 5),
)
EMPTY_ROWS = ((20, 20, -OPEN, -3), (20, 20, 5, OPEN), (20, 12, -4, 0), (8, 30, -OPEN, -2), (5, 5, 9, 12))
"""Rows, columns, lo, hi."""

# Error norm over the truth's norm: rounding of one call, with room for another order of additions; a wrong key is off by 0.05.
_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Of lse, absolute: it never leaves float32.
_LSE_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}


@dataclass(frozen=True)
class Subject:
    """What is checked, and on what: `heads` is one of `HEADS`."""

    kernel: AttentionKernel
    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int, int]
    scale: float
    batch: int = 2

    def draw(self, rows: int, columns: int, seed: int = 0, strided: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout of one tile; `strided` makes them views, with NaN all around, of tokens-first storage."""
        h, g, d, e = self.heads
        generator = torch.Generator().manual_seed(seed)
        shapes = (rows, h, d), (columns, g, d), (columns, g, e), (rows, h, e)
        drawn = [torch.randn(self.batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
        q, k, v, dout = (x.to(self.device, self.dtype) for x in drawn)
        return (_embed(q), _embed(k), _embed(v), _embed(dout)) if strided else (q, k, v, dout)


def check(
    kernel: AttentionKernel,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    only: str | None = None,
    heads: Sequence[tuple[int, int, int, int]] = HEADS,
) -> None:
    """Checks all properties of `kernel`, or `only` one of `PROPERTIES`, on tensors of `dtype` on `device`.

    Raises `AssertionError` that names kernel, property, tile and error.
    """
    device = torch.device(device)
    served = [x for x in heads if kernel.rejection(device, dtype, x[2], x[3]) is None]
    assert served, f"{kernel.name} serves none of the head sizes {sorted({x[2:] for x in heads})} in {dtype} on {device}"
    for name in PROPERTIES if only is None else [only]:
        for sizes in served:
            try:
                PROPERTIES[name](Subject(kernel, device, dtype, sizes, scale=sizes[2] ** -0.5))
            except AssertionError as error:
                at = f"heads {sizes[0]}:{sizes[1]}, head sizes {sizes[2]} and {sizes[3]}, {dtype}"
                raise AssertionError(f"{kernel.name}, {name}: {error} ({at})") from None


def _full(subject: Subject) -> None:
    for rows, columns in RECTANGLES:
        _tile(subject, rows, columns, -OPEN, OPEN)


def _causal(subject: Subject) -> None:
    for rows in (1, 33, 64, 130):
        _tile(subject, rows, rows, -OPEN, 0)


def _bands(subject: Subject) -> None:
    for band in BANDS if subject.kernel.capabilities.bands else ():
        _tile(subject, *band)


def _empty_rows(subject: Subject) -> None:
    for band in EMPTY_ROWS if subject.kernel.capabilities.bands else ():
        _tile(subject, *band)


def _scale(subject: Subject) -> None:
    for scale in (0.03, 1.0):
        _tile(replace(subject, scale=scale), 33, 33, -OPEN, 0)


def _strided(subject: Subject) -> None:
    """Reads its view and nothing around it."""
    for lo, hi in ((-OPEN, OPEN), (-OPEN, 0)):
        _tile(subject, 33, 33, lo, hi, strided=True)


def _natural_log(subject: Subject) -> None:
    q, k, v, _ = subject.draw(33, 40)
    _, lse = subject.kernel.forward(q, k, v, lo=-OPEN, hi=OPEN, scale=subject.scale)
    truth = _logits(q, k, subject.scale).logsumexp(-1)
    base = float((truth / lse.double()).median())
    assert abs(base - 1) < 1e-2, f"lse is the natural logarithm times {1 / base:.4f}"


def _written(subject: Subject) -> None:
    """Every element of every output is written: fresh memory is NaN."""
    with _nan_memory():
        for lo, hi in ((-OPEN, OPEN), (-OPEN, 0)):
            _tile(subject, 45, 45, lo, hi)
        _varlen(subject)


def _merged(subject: Subject) -> None:
    """Backward with out and lse of the whole row gives the tile's exact share of the gradients."""
    q, k, v, dout = subject.draw(33, 33)
    more_k, more_v = subject.draw(33, 47, seed=1)[1:3]
    every = torch.ones(33, 47, dtype=torch.bool, device=q.device)
    allowed = torch.cat([every[:, :33].tril(), every], 1)
    truth = _truth(q, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1), dout, allowed, subject.scale)
    out, lse = truth.out.to(subject.dtype), truth.lse.to(torch.promote_types(subject.dtype, torch.float32))
    options: dict[str, Any] = {"lo": -OPEN, "scale": subject.scale}
    first = subject.kernel.backward(dout, q, k, v, out, lse, hi=0, **options)
    second = subject.kernel.backward(dout, q, more_k, more_v, out, lse, hi=OPEN, **options)
    _close("dq of two tiles", first[0].double() + second[0].double(), truth.dq, subject)
    for name, a, b, whole in zip(("dk", "dv"), first[1:], second[1:], (truth.dk, truth.dv), strict=True):
        _close(f"{name} of a causal tile among two", a, whole[:, :33], subject)
        _close(f"{name} of a full tile among two", b, whole[:, 33:], subject)


def _varlen(subject: Subject) -> None:
    if not subject.kernel.capabilities.varlen:
        return
    assert isinstance(subject.kernel, VarlenKernel), "capabilities say varlen, but there are no varlen methods"
    sizes = [(7, 7), (1, 1), (40, 40), (3, 3)], [(5, 19), (33, 4), (1, 1), (9, 64)]
    _packed(subject, sizes[0], -1, 0)
    _packed(subject, sizes[1], -1, -1)
    if subject.kernel.capabilities.bands:
        for left, right in ((5, 0), (-1, 2), (4, -1)):
            _packed(subject, [*sizes[0], (5, 19), (8, 12)], left, right)


def _repeats(subject: Subject) -> None:
    """The same bits twice, where the kernel promises that and does not refuse."""
    with determinism(True):
        refused = subject.kernel.rejection(subject.device, subject.dtype, *subject.heads[2:]) is not None
        if refused or not subject.kernel.capabilities.deterministic:
            return
        q, k, v, dout = subject.draw(130, 130)
        runs = []
        for _ in range(2):
            out, lse = subject.kernel.forward(q, k, v, lo=-OPEN, hi=0, scale=subject.scale)
            runs.append((out, lse, *subject.kernel.backward(dout, q, k, v, out, lse, lo=-OPEN, hi=0, scale=subject.scale)))
        assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True)), "two runs differ in their bits"


PROPERTIES: dict[str, Callable[[Subject], None]] = {
    "full rectangles": _full,
    "causal squares": _causal,
    "natural-log lse": _natural_log,
    "scale": _scale,
    "bands": _bands,
    "empty rows": _empty_rows,
    "strided views": _strided,
    "merged backward": _merged,
    "varlen": _varlen,
    "every element written": _written,
    "deterministic": _repeats,
}


def _tile(subject: Subject, rows: int, columns: int, lo: int, hi: int, strided: bool = False) -> None:
    q, k, v, dout = subject.draw(rows, columns, strided=strided)
    offset = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
    truth = _truth(q, k, v, dout, (offset >= lo) & (offset <= hi), subject.scale)
    options: dict[str, Any] = {"lo": lo, "hi": hi, "scale": subject.scale}
    out, lse = subject.kernel.forward(q, k, v, **options)
    grads = subject.kernel.backward(dout, q, k, v, out, lse, **options)
    _compare(f"{rows} x {columns} tile, band {_band(lo, hi)}", (out, lse, *grads), truth, subject)


def _packed(subject: Subject, sizes: list[tuple[int, int]], left: int, right: int) -> None:
    """Many tiles in one call, against each alone."""
    one = replace(subject, batch=1)
    parts = [one.draw(*size, seed=seed) for seed, size in enumerate(sizes)]
    q, k, v, dout = (torch.cat(column, 1)[0] for column in zip(*parts, strict=True))
    ends = [torch.tensor([0, *accumulate(column)], dtype=torch.int32, device=q.device) for column in zip(*sizes, strict=True)]
    max_q, max_k = (max(column) for column in zip(*sizes, strict=True))
    packing = Packing(ends[0], ends[1], max_q, max_k, left, right)
    kernel = cast(VarlenKernel, subject.kernel)
    out, lse = kernel.forward_varlen(q, k, v, packing, subject.scale)
    dq, dk, dv = kernel.backward_varlen(dout, q, k, v, out, lse, packing, subject.scale)
    bounds = zip(*(pairwise(x.tolist()) for x in ends), strict=True)
    for (rows, columns), ((q0, q1), (k0, k1)), part in zip(sizes, bounds, parts, strict=True):
        offset = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None] - (columns - rows)
        allowed = (offset >= -left if left >= 0 else offset >= -OPEN) & (offset <= right if right >= 0 else offset <= OPEN)
        truth = _truth(*part, allowed, subject.scale)
        got = out[None, q0:q1], lse[None, :, q0:q1], dq[None, q0:q1], dk[None, k0:k1], dv[None, k0:k1]
        _compare(f"{rows} x {columns} tile of a varlen batch, window ({left}, {right})", got, truth, one)


@dataclass(frozen=True)
class _Truth:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale


def _truth(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor, scale: float) -> _Truth:
    """By autograd in float64. Rows that see nothing have out 0, lse -inf and no gradient."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    empty = ~allowed.any(1)
    scores = _logits(q, k, scale).masked_fill(~allowed, -math.inf)
    p = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
    out = torch.einsum("bhqk,bkhe->bqhe", p, v.repeat_interleave(q.shape[2] // k.shape[2], 2))
    return _Truth(out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), dout.double()))


def _compare(what: str, got: Sequence[Tensor], truth: _Truth, subject: Subject) -> None:
    out, lse, *grads = got
    assert lse.dtype in (torch.float32, torch.float64), f"lse of a {what} is {lse.dtype}"
    for name, x, true in zip(("out", "lse", "dq", "dk", "dv"), got, vars(truth).values(), strict=True):
        assert x.shape == true.shape, f"{name} of a {what} has shape {tuple(x.shape)} instead of {tuple(true.shape)}"
    empty = truth.lse.isneginf()
    assert torch.equal(lse.isneginf(), empty), f"lse of a {what} is -inf in other rows than those that see nothing"
    off = float((lse.double() - truth.lse)[~empty].abs().max()) if not empty.all() else 0.0
    assert off <= _LSE_TOLERANCE[subject.dtype], f"lse of a {what} is off by {off:.1e}"
    assert not (out.transpose(1, 2)[empty] != 0).any(), f"out of a {what} is not 0 where a row sees nothing"
    for name, x, true in zip(("out", "dq", "dk", "dv"), (out, *grads), (truth.out, truth.dq, truth.dk, truth.dv), strict=True):
        _close(f"{name} of a {what}", x, true, subject)


def _close(what: str, x: Tensor, truth: Tensor, subject: Subject) -> None:
    assert x.isfinite().all(), f"{what} has NaN or infinity"
    # Gradients of scores vanish where a row sees one key: what remains is rounding, measured against the size of 1.
    floor = 0.1 * math.sqrt(truth.numel())
    off = float((x.double() - truth).norm() / truth.norm().clamp(min=floor))
    assert off <= _TOLERANCE[subject.dtype], f"{what} is off by {off:.1e}, more than {_TOLERANCE[subject.dtype]:.0e}"


def _embed(x: Tensor) -> Tensor:
    """The same values as a view of a larger [s, b, h, d] tensor that is NaN elsewhere."""
    b, s, h, d = x.shape
    around = torch.full((s + 9, b, h, d), math.nan, dtype=x.dtype, device=x.device)
    around[4 : 4 + s] = x.transpose(0, 1)
    return around[4 : 4 + s].transpose(0, 1)


def _band(lo: int, hi: int) -> str:
    return f"({'-' if lo == -OPEN else lo}, {'-' if hi == OPEN else hi})"


@contextmanager
def _nan_memory() -> Iterator[None]:
    """torch fills memory with NaN that it would leave uninitialized."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch: Any = importlib.import_module("torch.utils.deterministic")
    fill = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switch.fill_uninitialized_memory = fill
