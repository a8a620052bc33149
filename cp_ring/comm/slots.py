"""The fixed pool of receive buffers for keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_ring.observe import debug
from cp_ring.observe.counters import recording

Shape = tuple[int, ...]


class Slots:
    """At most `count` buffers of `num_tokens` tokens, allocated on first use and reused.

    A buffer is a pair: keys `[num_tokens, *key.shape[1:]]` and values `[num_tokens, *value.shape[1:]]`, in `dtype` or else in the
    dtypes of `key` and `value`. `take` asserts that no more than `count` are in use: the plan was proven to need no more.
    """

    def __init__(self, count: int, num_tokens: int, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        self._count, self._num_tokens, self._like, self._dtype = count, num_tokens, (key, value), dtype
        self._free: list[tuple[Tensor, Tensor]] = []
        self._made = 0

    @property
    def free(self) -> int:
        """How many buffers can be taken now."""
        return self._count - self._made + len(self._free)

    def take(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The first `num_tokens` tokens of a free buffer; their contents are undefined."""
        if not self._free:
            assert self._made < self._count, f"more than {self._count} slots needed"
            self._made += 1
            key, value = (x.new_empty((self._num_tokens, *x.shape[1:]), dtype=self._dtype or x.dtype) for x in self._like)
            self._free.append((key, value))
        for counters in recording():
            counters.slot(+1)
        key, value = self._free.pop()
        debug.fill(key, value)
        return key[:num_tokens], value[:num_tokens]

    def give(self, buffer: tuple[Tensor, Tensor]) -> None:
        """Returns a buffer to the pool; its contents may be overwritten from now on."""
        key, value = (x.as_strided((self._num_tokens, *x.shape[1:]), x.stride()) for x in buffer)
        self._free.append((key, value))
        for counters in recording():
            counters.slot(-1)
