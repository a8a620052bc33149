"""The buffers of keys and values, in the form in which they travel."""

from __future__ import annotations

from torch import Tensor

Buffer = tuple[Tensor, ...]
"""Tensors of the same tokens, which are their first dimension: keys and values, or their encoded
form.
"""


class Slots(dict[int, Buffer]):
    """The buffers of one call by number: 0 is `own`, this rank's own tokens. The others exist from
    the messages of a hop to its end, each with the tokens of its hop.
    """

    def __init__(self, own: Buffer):
        super().__init__({0: own})

    def make(self, slot: int, num_tokens: int) -> Buffer:
        """Make the buffer of a slot; its contents are undefined."""
        buffer = self[slot] = self._allocated(num_tokens)
        return buffer

    def _allocated(self, num_tokens: int) -> Buffer:
        return tuple(x.new_empty((num_tokens, *x.shape[1:])) for x in self[0])
