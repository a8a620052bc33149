"""What a token's keys and values weigh on the wire, by codec: bytes, and the work of decoding. See `cp_ring.comm.codecs`.

Sizes: g key/value heads, d and e head sizes of keys and values, all for one token of one batch row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SCALE_BYTES = 4
"""A scale is float32. Each token has two for each key/value head: one of its key, one of its value."""


class LatentSizes(NamedTuple):
    """Sizes of multi-latent attention: the latent, the rotated shared key, and a head's own part of the key, and its value."""

    latent: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class Wire:
    """A codec's widths, and its error. `key_element` are bytes of an element of keys and values, None for those of the inputs.

    `scales`: whether each key and each value has a scale. `latent`: whether a latent travels instead of keys and values, in both
    directions.
    `error` is the most that out and gradients of N(0, 1) inputs are off, relative to their norm, beside what `plain` is off.
    """

    name: str
    key_element: int | None = None
    scales: bool = False
    latent: bool = False
    error: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether keys and values travel as they are."""
        return self.key_element is None and not self.latent

    @property
    def widening(self) -> float:
        """By how much the bounds of the certificate widen: its probes have few tokens, and other masks and draws."""
        return 2 * self.error

    def elements(self, kv_heads: int, head_sizes: int, latent: LatentSizes | None) -> int:
        """Elements of a token that travel, and gradients of it; `head_sizes` is d + e."""
        if self.latent:
            assert latent is not None
            return latent.latent + latent.rope
        return kv_heads * head_sizes

    def key_bytes(self, kv_heads: int, head_sizes: int, element: int, latent: LatentSizes | None = None) -> int:
        """Bytes of a token's keys and values, where an element of the inputs has `element` bytes."""
        width = self.elements(kv_heads, head_sizes, latent) * (self.key_element or element)
        return width + (2 * kv_heads * SCALE_BYTES if self.scales else 0)

    def decode_flops(self, kv_heads: int, latent: LatentSizes | None) -> tuple[int, int]:
        """FLOPs of the reader for a token that arrives: (forward, backward). Only matrix products count.

        Backward decodes again, and multiplies by the weight for the latent's gradient and by the latent for the weight's.
        """
        if not self.latent:
            return 0, 0
        assert latent is not None
        product = 2 * latent.latent * kv_heads * (latent.nope + latent.value)
        return product, 3 * product


def widening(wire: str) -> float:
    """`Wire.widening` of a codec by its name, and 0 for `auto`, which never chooses one that costs accuracy."""
    return 0.0 if wire == "auto" else WIRES[wire].widening


WIRES = {
    wire.name: wire
    for wire in (
        Wire("plain"),
        Wire("int8", key_element=1, scales=True, error=0.012),
        Wire("fp8", key_element=1, scales=True, error=0.05),
        Wire("latent", latent=True),
    )
}
