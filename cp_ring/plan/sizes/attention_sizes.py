"""Sizes of one attention layer, and the bytes of a token's keys and values on the wire, by codec.

Widths are in bytes, for one token of one batch row; see `cp_ring.comm.codecs` for the tensors that
travel. Sizes: g key/value heads, d and e head sizes of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_ring.errors import PlanError
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.runtime import RUNTIME

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

SCALE_BYTES = 4
"""A scale is float32. Each token has two for each key/value head: one of its key, one of its value.
"""


class LatentSizes(NamedTuple):
    """Sizes of multi-latent attention: the latent, the rotated shared key, a head's own part of the
    key, and its value.
    """

    latent: int
    rope: int
    nope: int
    value: int

    @property
    def decoded(self) -> int:
        """The elements of the weight that makes a head's key and value of the latent."""
        return self.latent * (self.nope + self.value)


@dataclass(frozen=True)
class Wire:
    """A codec's widths and its error.

    key_element: bytes of an element of keys and values; None for those of the inputs.
    scales: True if each key and each value has a scale.
    latent: True if a latent travels instead of keys and values, in both directions.
    error: the largest error that the codec adds to out and gradients of N(0, 1) inputs, relative to
    their norm.
    """

    name: str
    key_element: int | None = None
    scales: bool = False
    latent: bool = False
    error: float = 0.0

    @property
    def plain(self) -> bool:
        """True if keys and values travel as they are."""
        return self.key_element is None and not self.latent

    @property
    def widening(self) -> float:
        """The number by which the bounds of the certificate widen. It is twice the error, because
        the probes have few tokens, and other masks and draws.
        """
        return 2 * self.error


WIRES = {
    wire.name: wire
    for wire in (
        Wire("plain"),
        Wire("int8", key_element=1, scales=True, error=0.012),
        Wire("fp8", key_element=1, scales=True, error=0.05),
        Wire("latent", latent=True),
    )
}


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one attention layer's tensors.

    value_dim: the head size of values; by default `head_dim`.
    dtype: of queries, keys and values.
    wire_dtype: of gradients that travel; by default `dtype`.
    wire: the codec of keys that travel.
    latent: the sizes of multi-latent attention, which the codec `latent` needs.

    Raises `PlanError` for sizes that do not fit together.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    dtype: str = "bf16"
    wire_dtype: str | None = None
    batch: int = 1
    wire: str = "plain"
    latent: LatentSizes | None = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise PlanError(
                f"{self.kv_heads} key/value heads do not divide {self.heads} query heads"
            )
        if self.head_dim < 1 or (self.value_dim or 1) < 1 or self.batch < 1:
            raise PlanError(
                f"head_dim {self.head_dim}, value_dim {self.value_dim}, batch {self.batch}: each "
                "must be at least 1"
            )
        for name in (self.dtype, self.wire_dtype or self.dtype):
            if name not in DTYPE_BYTES:
                raise PlanError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
        if self.wire not in WIRES:
            raise PlanError(f"wire {self.wire!r}: known are {', '.join(WIRES)}")
        if self.codec.latent and self.latent is None:
            raise PlanError(f"wire {self.wire} needs the sizes of multi-latent attention, latent=")

    @property
    def codec(self) -> Wire:
        """The widths of the codec."""
        return WIRES[self.wire]

    @property
    def element(self) -> int:
        """Bytes of an element of queries, keys and values."""
        return DTYPE_BYTES[self.dtype]

    @property
    def wire_element(self) -> int:
        """Bytes of an element of a gradient that travels."""
        return DTYPE_BYTES[self.wire_dtype or self.dtype]

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, in all batch rows."""
        return self.batch * self.heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Elements of a token's output, in all batch rows."""
        return self.batch * self.heads * (self.value_dim or self.head_dim)

    @property
    def pair_flops(self) -> tuple[int, int]:
        """FLOPs of an allowed pair of a query and a key, over all query heads and batch rows:
        (forward, backward), two and five matrix products. A multiply-add counts as 2.
        """
        queries, out = self.query_width, self.out_width
        return 2 * (queries + out), 2 * (3 * queries + 2 * out)

    @property
    def key_width(self) -> int:
        """Elements of a token's keys and values, in all batch rows."""
        return self.batch * self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def on_wire(self) -> tuple[int, int]:
        """Return the bytes of a token in the ring: (keys and values, their gradients)."""
        codec, width = self.codec, self.key_width
        if codec.latent and self.latent is not None:
            width = self.batch * (self.latent.latent + self.latent.rope)
        scales = 2 * self.batch * self.kv_heads * SCALE_BYTES * codec.scales
        return width * (codec.key_element or self.element) + scales, width * self.wire_element

    @property
    def decode_flops(self) -> tuple[int, int]:
        """FLOPs in which the reader decodes a token: (forward, backward). Only matrix products
        count.

        Backward decodes again, and multiplies by the weight for the latent's gradient and by the
        latent for the weight's gradient.
        """
        if not self.codec.latent or self.latent is None:
            return 0, 0
        product = 2 * self.batch * self.kv_heads * self.latent.decoded
        return product, 3 * product

    def groups(self, heads: int) -> int:
        """Return the number of groups in which a rank that exchanges tokens for heads with `heads`
        ranks computes its heads.
        """
        return split_heads(self.heads, self.kv_heads, heads).groups if heads > 1 else 1

    @RUNTIME.cache(maxsize=64)
    def of_rank(self, heads: int) -> AttentionSizes:
        """Return the sizes of a rank that exchanges tokens for heads with `heads` ranks, itself
        included; see `split_heads`. Latents have no heads to exchange, so keys and values travel
        as they are.
        """
        split = split_heads(self.heads, self.kv_heads, heads)
        wire = "plain" if heads > 1 and self.codec.latent else self.wire
        own = split.kv_heads_of_rank
        return replace(self, wire=wire, heads=self.heads // heads, kv_heads=own)
