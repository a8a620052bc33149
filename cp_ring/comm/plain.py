"""Codecs: the form in which keys and values travel. The owner encodes once a call, the reader
decodes once a hop.

A codec is a class, and an object of it holds the keys and values of one call. The hop loop computes
with the keys that `keys` yields, and gives its partial gradients to `gradients`. Slots, streams and
transports move the tensors that `encode` returns, whatever their shapes and dtypes. Widths in
bytes, for plans, are in `cp_ring.plan.sizes.attention_sizes`; the conformance test compares both.

Hop 0 computes with this rank's own keys as they are. Every other rank computes with the decoded
keys, in forward and in backward alike, so that the softmax weights of both agree.

Tensors have tokens first: k [s, b, g, d], v [s, b, g, e].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cp_ring.comm.gradients import GradStream, Updates
from cp_ring.comm.streams import KeyStream
from cp_ring.comm.transport import Buffer, Transport
from cp_ring.plan.records import Hop, Turn

Keys = Iterable[tuple[Hop, Tensor, Tensor]]
"""For each hop, the keys [num_keys, b, g, d] and values [num_keys, b, g, e] that its tiles read."""


class Plain:
    """Keys and values travel as they are, and tiles read them where they arrive. Other codecs
    derive from this one; their constructors take k and v, then their other inputs.

    needs_latents: True if the other inputs are those of `LatentKeys`, which have no heads to
    exchange. Then the updates of `gradients` are those of kernel calls alone, because the gradients
    that arrive are those of latents.
    """

    name = "plain"
    needs_latents = False

    def __init__(self, k: Tensor, v: Tensor, *_: Tensor):
        self._k, self._v = k, v

    def encode(self) -> Buffer:
        """Return this rank's own tokens in the form that travels: tensors [s, ...]."""
        return self._k, self._v

    def keys(self, order: Sequence[Turn], transport: Transport | None) -> Keys:
        """Yield the keys and values of each hop."""
        return KeyStream(order, transport, self.encode())

    def gradients(
        self, updates: Updates, transport: Transport | None, wire_dtype: torch.dtype
    ) -> GradStream:
        """Return the gradients of one backward pass."""
        return GradStream(updates, transport, (self._k, self._v), wire_dtype)
