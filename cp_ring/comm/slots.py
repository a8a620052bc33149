"""The fixed pool of receive buffers for keys and values, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cp_ring.observe import debug
from cp_ring.observe.counters import recording

Buffer = tuple[Tensor, ...]
"""Tensors of the same tokens, which are their first dimension: keys and values, or their encoded
form.
"""


class Slots:
    """At most `count` buffers, each used by one hop at a time, allocated on first use and reused.

    A buffer holds a tensor [num_tokens, *x.shape[1:]] in the dtype of x for each x of `like`.
    `take` asserts that no more than `count` are in use: the plan was proven to need no more.
    """

    def __init__(self, count: int, num_tokens: int, like: Sequence[Tensor]):
        self._count, self._num_tokens, self._like = count, num_tokens, like
        self._free: list[Buffer] = []
        self._taken: dict[int, Buffer] = {}

    @property
    def free(self) -> int:
        """The number of buffers that can be taken now."""
        return self._count - len(self._taken)

    def take(self, hop: int, num_tokens: int) -> Buffer:
        """Return the first `num_tokens` tokens of a free buffer, which belongs to the hop from now
        on; their contents are undefined.
        """
        assert self.free, f"more than {self._count} slots needed"
        buffer = self._taken[hop] = self._free.pop() if self._free else self._allocated()
        for counters in recording():
            counters.slot(+1)
        debug.fill(*buffer)
        return buffer if num_tokens == self._num_tokens else tuple(x[:num_tokens] for x in buffer)

    def give(self, hop: int) -> None:
        """Return the hop's buffer to the pool; its contents may be overwritten from now on."""
        self._free.append(self._taken.pop(hop))
        for counters in recording():
            counters.slot(-1)

    def _allocated(self) -> Buffer:
        return tuple(x.new_empty((self._num_tokens, *x.shape[1:])) for x in self._like)
