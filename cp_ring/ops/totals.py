"""Totals: out with lse, dq, or dk with dv, made from partial results as they come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.ops.dtypes import lse_dtype, sum_dtype
from cp_ring.ops.merge import merge
from cp_ring.ops.segments import Segments
from cp_ring.ops.sums import add

Shape = Sequence[int]


class Sum:
    """The sum of partial results, each of which has a tensor [t, b, heads, size] for each of
    `shapes`, [s, b, heads, size].

    It keeps partial results until the next of `updates` has all of its parts; then the update runs.
    The result has `dtype`, and the running total `sum_dtype(dtype)`.
    """

    def __init__(
        self,
        updates: Sequence[Segments],
        shapes: Sequence[Shape],
        like: Tensor,
        dtype: torch.dtype,
    ):
        self._updates, self._shapes, self._like, self._dtype = updates, shapes, like, dtype
        self._wide = sum_dtype(dtype)
        self._running, self._result = list[Tensor](), list[Tensor]()
        self._waiting: list[tuple[Tensor, ...]] = []
        self._done = 0

    def add(self, *part: Tensor) -> None:
        """Add the next partial result, which must not change until its update has run."""
        self._waiting.append(part)
        if len(self._waiting) == self._updates[self._done].parts:
            self._run()

    def finish(self) -> Sequence[Tensor]:
        """Return the total, [s, b, heads, size] for each shape, contiguous. All partial results
        must have been added.
        """
        while self._done < len(self._updates):
            self._run()
        return self._result or self._allocated(self._dtype)

    def _run(self) -> None:
        segments, parts = self._updates[self._done], self._waiting
        assert len(parts) == segments.parts, "a partial result is missing"
        self._waiting, self._done = [], self._done + 1
        as_it_is = segments.whole and {
            (x.dtype, x.is_contiguous()) for x in parts[0][: len(self._shapes)]
        } == {(self._dtype, True)}
        if as_it_is:
            self._take(*parts[0])
        else:
            self._update(segments, list(zip(*parts, strict=True)))

    def _take(self, *part: Tensor) -> None:
        """Take the one part of the whole total as the result."""
        self._result = list(part)

    def _update(self, segments: Segments, columns: Sequence[Sequence[Tensor]]) -> None:
        """Run one update for each tensor of the total, with its column of parts."""
        results = self._allocate(segments)
        for index, result in enumerate(results):
            add(
                segments,
                columns[index] if columns else (),
                self._running[index] if self._running else None,
                result,
            )

    def _allocate(self, segments: Segments) -> Sequence[Tensor]:
        """Make the tensors that an update stores to, and return those of the result: empty ones
        until an update completes some tokens, because kernel calls before that need the memory.
        """
        same = self._dtype == self._wide
        if not self._result and (same or segments.ends):
            self._result = self._allocated(self._dtype)
        if not self._running and same:
            self._running = [x[segments.kept] for x in self._result]
        elif not self._running and segments.stays:
            self._running = self._allocated(self._wide, segments.kept)
        return self._result or [self._like.new_empty(0, dtype=self._dtype)] * len(self._shapes)

    def _allocated(self, dtype: torch.dtype, tokens: slice = slice(None)) -> list[Tensor]:
        """Make tensors of these tokens of the total."""
        count = len(range(self._shapes[0][0])[tokens])
        return [self._like.new_empty((count, *shape[1:]), dtype=dtype) for shape in self._shapes]


class Merge(Sum):
    """The total out [s, b, h, e] with lse [b, h, s], merged from partial results (out [t, b, h, e],
    lse [b, h, t]). It keeps and adds them as `Sum` does.
    """

    def __init__(self, updates: Sequence[Segments], shape: Shape, like: Tensor, dtype: torch.dtype):
        super().__init__(updates, [shape], like, dtype)
        self._lse: Tensor | None = None

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return out in `dtype`, and lse in `sum_dtype(dtype)`; both contiguous."""
        (out,) = super().finish()
        lse = self._empty_lse() if self._lse is None else self._lse
        return out, lse.to(self._wide).contiguous()

    def _take(self, *part: Tensor) -> None:
        out, self._lse = part
        # A tensor of its own: callers may change the result in place, which autograd forbids for
        # some views.
        self._result = [out.new_empty(0).set_(out)]  # type: ignore[call-overload]

    def _update(self, segments: Segments, columns: Sequence[Sequence[Tensor]]) -> None:
        outs, lses = columns or ((), ())
        (result,) = self._allocate(segments)
        self._lse = self._empty_lse() if self._lse is None else self._lse
        merge(
            segments,
            outs,
            lses,
            self._running[0] if self._running else None,
            self._lse,
            result,
        )

    def _empty_lse(self) -> Tensor:
        s, b, h, _ = self._shapes[0]
        return self._like.new_empty((b, h, s), dtype=lse_dtype(self._like.device, self._wide))
