"""The fixed pool of receive buffers for keys and values."""

from __future__ import annotations

from torch import Tensor

from cp_ring.observe import debug
from cp_ring.observe.counters import recording

Buffer = tuple[Tensor, Tensor]
"""Keys and values of the same tokens, which are the first dimension."""


class Slots:
    """At most `count` buffers, each of a hop at a time, allocated on first use and reused.

    A buffer holds keys [num_tokens, *key.shape[1:]] and values [num_tokens, *value.shape[1:]], in the dtypes of `key` and
    `value`. `take` asserts that no more than `count` are in use: the plan was proven to need no more.
    """

    def __init__(self, count: int, num_tokens: int, key: Tensor, value: Tensor):
        self._count, self._num_tokens, self._like = count, num_tokens, (key, value)
        self._free: list[Buffer] = []
        self._taken: dict[int, Buffer] = {}

    @property
    def free(self) -> int:
        """How many buffers can be taken now."""
        return self._count - len(self._taken)

    def take(self, hop: int, num_tokens: int) -> Buffer:
        """The first `num_tokens` tokens of a free buffer, which is the hop's from now on; their contents are undefined."""
        assert self.free, f"more than {self._count} slots needed"
        key, value = self._taken[hop] = self._free.pop() if self._free else self._allocated()
        for counters in recording():
            counters.slot(+1)
        debug.fill(key, value)
        return (key, value) if num_tokens == self._num_tokens else (key[:num_tokens], value[:num_tokens])

    def give(self, hop: int) -> None:
        """Returns the hop's buffer to the pool; its contents may be overwritten from now on."""
        self._free.append(self._taken.pop(hop))
        for counters in recording():
            counters.slot(-1)

    def _allocated(self) -> Buffer:
        key, value = (x.new_empty((self._num_tokens, *x.shape[1:])) for x in self._like)
        return key, value
