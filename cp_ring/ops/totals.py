"""Totals: out with lse, dq, or dk with dv, made from partial results as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from cp_ring.ops.dtypes import lse_dtype, sum_dtype
from cp_ring.ops.merge import merge
from cp_ring.ops.segments import Segments
from cp_ring.ops.sums import add

Shape = Sequence[int]


@dataclass
class Sum:
    """The sum of partial results, each of which has a tensor [t, b, heads, size] for each of
    `sizes`, (b, heads, size); with `dim` 1 tokens are their second dimension, [b, t, heads, size].

    It keeps partial results until the next of `updates` has all of its parts; then the update runs.
    The result has `dtype`, and the running total `sum_dtype(dtype)`. They are on the device of
    `like`.
    """

    updates: Sequence[Segments]
    num_tokens: int
    sizes: Sequence[Shape]
    like: Tensor
    dtype: torch.dtype
    dim: int = 0

    def __post_init__(self) -> None:
        self._running: Sequence[Tensor] = ()
        self._result: Sequence[Tensor] = ()
        self._waiting: list[tuple[Tensor, ...]] = []
        self._done = 0

    @classmethod
    def of_queries(
        cls, updates: Sequence[Segments], q: Tensor, size: int, dtype: torch.dtype
    ) -> Self:
        """Begin a total [b, s, h, size] of the queries q [b, s, h, d]."""
        b, s, h, _ = q.shape
        return cls(updates, s, [(b, h, size)], q, dtype, dim=1)

    @property
    def _wide(self) -> torch.dtype:
        return sum_dtype(self.dtype)

    def add(self, *part: Tensor) -> None:
        """Add the next partial result, which must not change until its update has run."""
        self._waiting.append(part)
        if len(self._waiting) == self.updates[self._done].parts:
            self._run()

    def finish(self) -> Sequence[Tensor]:
        """Return the total for each of the sizes, with tokens first in memory. All partial results
        must have been added.
        """
        while self._done < len(self.updates):
            self._run()
        return self._result or self._allocated(self.dtype, self.num_tokens)

    def _run(self) -> None:
        segments, parts = self.updates[self._done], self._waiting
        assert len(parts) == segments.parts, "a partial result is missing"
        self._waiting, self._done = [], self._done + 1
        if not (segments.whole and self._take(*parts[0])):
            self._update(segments, parts)

    def _take(self, *part: Tensor) -> bool:
        """Take the one part of the whole total as the result, if it has the form of a result."""
        for x in part:
            if x.dtype != self.dtype or not x.transpose(0, self.dim).is_contiguous():
                return False
        self._result = part
        return True

    def _update(self, segments: Segments, parts: Sequence[tuple[Tensor, ...]]) -> None:
        add(segments, parts, *self._allocate(segments), self.dim)

    def _allocate(self, segments: Segments) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Make the tensors that an update stores to: those of the running total, which may be those
        of the result, and those of the result. These are empty until an update completes some
        tokens, because kernel calls before that need the memory.
        """
        same = self.dtype == self._wide
        if segments.stays and not (same or self._running):
            count = segments.kept.stop - segments.kept.start
            self._running = self._allocated(self._wide, count)
        if not self._result and (same or segments.ends):
            self._result = self._allocated(self.dtype, self.num_tokens)
        results = self._result or [self.like.new_empty(0, dtype=self.dtype)] * len(self.sizes)
        return self._running or results, results

    def _allocated(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Make tensors of so many tokens of the total."""
        made = [self.like.new_empty((count, *size), dtype=dtype) for size in self.sizes]
        return [x.transpose(0, self.dim) for x in made]


class Merge(Sum):
    """The total out [b, s, h, e] with lse [b, h, s], merged from partial results (out [b, t, h, e],
    lse [b, h, t]) of the queries q [b, s, h, d]. It keeps and adds them as `Sum` does.
    """

    @cached_property
    def _lse(self) -> Tensor:
        b, h, _ = self.sizes[0]
        dtype = lse_dtype(self.like.device, self._wide)
        return self.like.new_empty((b, h, self.num_tokens), dtype=dtype)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return out in `dtype`, and lse in `sum_dtype(dtype)`, contiguous."""
        (out,) = super().finish()
        return out, self._lse.to(self._wide).contiguous()

    def _take(self, *part: Tensor) -> bool:
        taken = super()._take(*part[:1])
        if taken:
            self._lse = part[1]
        return taken

    def _update(self, segments: Segments, parts: Sequence[tuple[Tensor, ...]]) -> None:
        (running,), (result,) = self._allocate(segments)
        outs, lses = zip(*parts, strict=True) if parts else ((), ())
        merge(segments, outs, lses, running, self._lse, result)
