"""The fixed pool of receive buffers for keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_ring.observe import debug
from cp_ring.observe.counters import recording

Shape = tuple[int, ...]


class Slots:
    """At most `count` buffers of `rows` tokens, made on first use and handed round.

    A buffer is a pair, keys `[rows, *key_shape]` and values `[rows, *value_shape]`. Taking one more than `count` is a
    programming error, since the plan was proven to need no more.
    """

    def __init__(self, count: int, rows: int, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        self._count, self._rows, self._like, self._dtype = count, rows, (key, value), dtype
        self._free: list[tuple[Tensor, Tensor]] = []
        self._made = 0

    @property
    def free(self) -> int:
        """How many buffers can be taken now."""
        return self._count - self._made + len(self._free)

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        """A free buffer, cut to `rows`."""
        if not self._free:
            assert self._made < self._count, f"more than {self._count} slots needed"
            self._made += 1
            key, value = (x.new_empty((self._rows, *x.shape[1:]), dtype=self._dtype or x.dtype) for x in self._like)
            self._free.append((key, value))
        for counters in recording():
            counters.slot(+1)
        key, value = self._free.pop()
        debug.fill(key, value)
        return key[:rows], value[:rows]

    def give(self, buffer: tuple[Tensor, Tensor]) -> None:
        """Puts a buffer back; what it holds is lost."""
        key, value = (x.as_strided((self._rows, *x.shape[1:]), x.stride()) for x in buffer)
        self._free.append((key, value))
        for counters in recording():
            counters.slot(-1)
