"""The buffers of keys and values, in the form in which they travel."""

from __future__ import annotations

from torch import Tensor

Buffer = tuple[Tensor, ...]
"""Tensors of the same tokens, which are their first dimension: keys and values, or their encoded
form.
"""


class Slots(dict[int, Buffer]):
    """The buffers of one call by number: 0 is `own`, this rank's own tokens. The others have
    `num_tokens` tokens, and are made when they are first used.
    """

    def __init__(self, num_tokens: int, own: Buffer):
        super().__init__({0: own})
        self._num_tokens = num_tokens

    def __missing__(self, slot: int) -> Buffer:
        return self.setdefault(slot, self._allocated())

    def _allocated(self) -> Buffer:
        return tuple(x.new_empty((self._num_tokens, *x.shape[1:])) for x in self[0])
