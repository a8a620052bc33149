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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, override

import torch
from torch import Tensor

from cp_ring.comm.gradients import GradStream
from cp_ring.comm.slots import Buffer
from cp_ring.comm.streams import KeyStream, MessageOrder
from cp_ring.comm.transport import Transport
from cp_ring.ops.segments import Segments
from cp_ring.plan.sizes.attention_sizes import WIRES, Wire
from cp_ring.plan.tables import Hop, RankPlan

Keys = Iterable[tuple[Hop, Tensor, Tensor]]
"""For each hop, the keys [num_keys, b, g, d] and values [num_keys, b, g, e] that its tiles read."""


class KeyUpdates(Protocol):
    """The updates of the sums of dk and dv, by the index of the hop; see
    `cp_ring.kernels.calls.Work`.

    `keys` covers the kernel calls of a hop and the gradients that arrive, `own_keys` only the
    kernel calls.
    """

    @property
    def keys(self) -> Mapping[int, Sequence[Segments]]: ...

    @property
    def own_keys(self) -> Mapping[int, Sequence[Segments]]: ...


class Gradients(Protocol):
    """Takes the partial gradients of each hop's keys and values, and sends them to the owners of
    the keys.
    """

    def start(self, hop: Hop) -> None: ...

    def add(self, dk: Tensor, dv: Tensor) -> None: ...

    def send(self, hop: Hop) -> None: ...

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the codec's inputs, in the order of its constructor."""
        ...


class Codec(Protocol):
    """The keys and values of one call, and how they travel. The constructor takes k and v, then the
    codec's other inputs.

    needs_latents: True if the other inputs are those of `LatentKeys`, which have no heads to
    exchange.
    """

    name: str
    needs_latents: bool

    def __init__(self, k: Tensor, v: Tensor, *inputs: Tensor): ...

    def encode(self) -> Buffer:
        """Return this rank's own tokens in the form that travels: tensors [s, ...]."""
        ...

    def keys(self, order: MessageOrder, transport: Transport | None) -> Keys:
        """Yield the keys and values of each hop."""
        ...

    def gradients(
        self,
        rank_plan: RankPlan,
        updates: KeyUpdates,
        transport: Transport | None,
        wire_dtype: torch.dtype,
    ) -> Gradients:
        """Return the gradients of one backward pass."""
        ...


class Plain:
    """Keys and values travel as they are, and tiles read them where they arrive."""

    name = "plain"
    needs_latents = False

    def __init__(self, k: Tensor, v: Tensor):
        self._k, self._v = k, v

    def encode(self) -> Buffer:
        return self._k, self._v

    def keys(self, order: MessageOrder, transport: Transport | None) -> Keys:
        return KeyStream(order, transport, self.encode())

    def gradients(
        self,
        rank_plan: RankPlan,
        updates: KeyUpdates,
        transport: Transport | None,
        wire_dtype: torch.dtype,
    ) -> Gradients:
        own = self._k, self._v
        return GradStream(rank_plan, updates.keys, transport, own, wire_dtype)


class Decoding(Plain, ABC):
    """Base of codecs that decode the tensors of a hop into a buffer of their own, as large as
    plain keys would be.
    """

    @abstractmethod
    def decode(self, coded: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        """Write keys and values of all tokens of `coded` to k [n, b, g, d] and v [n, b, g, e]."""

    @override
    def keys(
        self, order: MessageOrder, transport: Transport | None
    ) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        for hop, *coded in KeyStream(order, transport, self.encode()):
            # A hop without tiles passes keys on without decoding them.
            if hop.receives and len(hop.tiles):
                own = self._k, self._v
                k, v = (x.new_empty((hop.num_keys, *x.shape[1:])) for x in own)
                self.received(coded, k, v)
                yield hop, k, v
                del k, v
            else:
                yield hop, self._k, self._v

    def received(self, coded: Sequence[Tensor], k: Tensor, v: Tensor) -> None:
        """Decode the tensors that a hop has received. A codec that needs them in backward overrides
        this method.
        """
        self.decode(coded, k, v)


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

    @abstractmethod
    def codes(self, x: Tensor) -> Tensor:
        """Return codes of float32 x within [-largest, largest], one byte an element; may
        change x.
        """

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """Return the codes in a dtype that converts to numbers."""

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
        key_codes, value_codes = self.values(codes).split([k.shape[-1], v.shape[-1]], -1)
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
        return self.codes(wide / scale[..., None]), scale


class Int8(Quantized):
    """Symmetric 8-bit integers: an element is off by at most half a scale, 1/254 of the largest
    element of its token and head.
    """

    name, largest = "int8", 127.0

    @override
    def codes(self, x: Tensor) -> Tensor:
        return x.round_().to(torch.int8)

    @override
    def values(self, codes: Tensor) -> Tensor:
        return codes


class Fp8(Quantized):
    """8-bit floating point numbers with 3 bits of mantissa (e4m3): an element is off by at most
    1/16 of its own magnitude.

    Elements below 2^-6 / 448 of the largest element of their token and head are off by at most
    2^-10 scales.
    """

    name, largest = "fp8", 448.0

    @override
    def codes(self, x: Tensor) -> Tensor:
        # bytes, because not every backend moves float8
        return x.to(torch.float8_e4m3fn).view(torch.uint8)

    @override
    def values(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Plain, Int8, Fp8)}
"""Classes of codecs by name, without that of latents; see `cp_ring.attention.codec_of`."""


def register(codec: type[Codec], wire: Wire) -> None:
    """Make a codec known by the name of `wire`, its widths and its error: to calls, flags, the
    costs of plans, and the bounds of the certificate.
    """
    codec.name = wire.name
    CODECS[wire.name], WIRES[wire.name] = codec, wire
