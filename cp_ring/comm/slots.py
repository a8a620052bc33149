"""The buffers of keys and values, in the form in which they travel."""

from __future__ import annotations

from torch import Tensor

Buffer = tuple[Tensor, ...]
"""Tensors of the same tokens, which are their first dimension: keys and values, or their encoded
form.
"""


class Slots:
    """The buffers of one call by number: 0 is `own`, this rank's own tokens. The others have
    `num_tokens` tokens, and are made when they are first used.
    """

    def __init__(self, num_tokens: int, own: Buffer):
        self._num_tokens, self._buffers = num_tokens, {0: own}

    def __getitem__(self, slot: int) -> Buffer:
        if slot not in self._buffers:
            self._buffers[slot] = self._allocated()
        return self._buffers[slot]

    def _allocated(self) -> Buffer:
        own = self._buffers[0]
        return tuple(x.new_empty((self._num_tokens, *x.shape[1:])) for x in own)
