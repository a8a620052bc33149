"""The codecs beside `Plain`, which decode what arrives, and the names of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import override

import torch
from torch import Tensor

from cp_ring.comm.plain import Plain
from cp_ring.comm.streams import KeyStream
from cp_ring.comm.transport import Buffer, Transport
from cp_ring.plan.records import Hop, Turn


class Decoding(Plain, ABC):
    """Base of codecs that decode the tensors of a hop into a buffer of their own, as large as
    plain keys would be.
    """

    @abstractmethod
    def decode(self, coded: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        """Write keys and values of all tokens of `coded` to k [n, b, g, d] and v [n, b, g, e]."""

    @override
    def keys(
        self, order: Sequence[Turn], transport: Transport | None
    ) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        for hop, *coded in KeyStream(order, transport, self.encode()):
            # A hop without tiles passes keys on without decoding them.
            if hop.receives and len(hop.tiles):
                own = self._k, self._v
                k, v = (x.new_empty((hop.num_keys, *x.shape[1:])) for x in own)
                self.decode(coded, k, v)
                yield hop, k, v
                del k, v
            else:
                yield hop, self._k, self._v


class Quantized(Decoding):
    """Base of codecs with one byte an element, and a float32 scale for the key and one for the
    value of each token and head.

    A scale is the largest magnitude divided by the largest code, so no code is out of range. A key
    or a value that has a NaN or an infinity arrives as NaN in all its elements, and no other token
    changes. Magnitudes above those of float32 are infinite. The gradients of the decoded keys and
    values are taken for those of the original ones.
    """

    largest: float
    """The largest code."""
    dtype: torch.dtype
    """The dtype of codes, which travel as bytes, because not every backend moves float8."""

    @override
    def encode(self) -> Buffer:
        """Return codes [s, b, g, d + e] and scales [s, b, g, 2], float32."""
        parts = [self._quantize(x) for x in (self._k, self._v)]
        return torch.cat([codes for codes, _ in parts], -1), torch.stack(
            [scale for _, scale in parts], -1
        )

    @override
    def decode(self, coded: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        codes, scales = coded
        key_codes, value_codes = codes.view(self.dtype).split([k.shape[-1], v.shape[-1]], -1)
        k.copy_(key_codes).mul_(scales[..., :1])
        v.copy_(value_codes).mul_(scales[..., 1:])

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        magnitude = wide.abs().amax(-1)
        limits = torch.finfo(torch.float32)
        # The product of the largest code and scale must not round to infinity.
        scale = (magnitude / self.largest).clamp(
            limits.tiny, limits.max / self.largest * (1 - 2**-20)
        )
        scale += 0 * magnitude  # NaN where the magnitude is infinite or NaN
        codes = wide / scale[..., None]
        if not self.dtype.is_floating_point:
            codes.round_()
        return codes.to(self.dtype).view(torch.uint8), scale


class Int8(Quantized):
    """Symmetric 8-bit integers: an element is off by at most half a scale, 1/254 of the largest
    element of its token and head.
    """

    name, largest, dtype = "int8", 127.0, torch.int8


class Fp8(Quantized):
    """8-bit floating point numbers with 3 bits of mantissa (e4m3): an element is off by at most
    1/16 of its own magnitude.

    Elements below 2^-6 / 448 of the largest element of their token and head are off by at most
    2^-10 scales.
    """

    name, largest, dtype = "fp8", 448.0, torch.float8_e4m3fn


CODECS: dict[str, type[Plain]] = {codec.name: codec for codec in (Plain, Int8, Fp8)}
"""Classes of codecs by name, without that of latents; see `cp_ring.attention`. The widths
and the error of each are in `WIRES`, by the same name.
"""
