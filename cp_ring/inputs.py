"""The inputs and outputs of a call of attention: its options, its tensors and their checks, and the
results that are kept for a recomputation.

Shapes: s tokens of this rank's shard, b batch, h query heads, g key/value heads, d head size of
queries and keys, e head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cp_ring.comm.agreement import EVERY
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.observe.watchdog import WATCH, Place
from cp_ring.ops.dtypes import in_one_dtype
from cp_ring.options import NUM_SLOTS, WIRE_DTYPES, CallSettings, either
from cp_ring.plan.sizes.attention_sizes import WIRES

if TYPE_CHECKING:
    from cp_ring.comm.latent import Latents

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttentionOptions:
    """The options of calls other than plan and group; `ring_attention` describes those that it
    shares.

    lse, max_logit: True if `Output.lse` or `Output.max_logit` is wanted.
    compare_every: `every` of `Agreement.check`.

    Raises `ConfigError` for a value that no call can have.
    """

    softmax_scale: float | None = None
    deterministic: bool | None = None
    kernel: str = CallSettings.kernel
    num_slots: int = CallSettings.num_slots
    wire: str = "plain"
    wire_dtype: str = CallSettings.wire_dtype
    qkv_format: str = "bshd"
    lse: bool = False
    max_logit: bool = False
    compare_every: int = EVERY

    def __post_init__(self) -> None:
        expect("softmax_scale", self.softmax_scale, Real, NoneType)
        expect("deterministic", self.deterministic, bool, NoneType)
        expect("return_lse", self.lse, bool)
        for name in ("kernel", "wire", "wire_dtype", "qkv_format"):
            expect(name, getattr(self, name), str)
        least, most = NUM_SLOTS
        if not isinstance(self.num_slots, Integral) or not least <= self.num_slots <= most:
            raise ConfigError(
                f"num_slots={self.num_slots!r}: it must be a whole number from {least} to {most}"
            )
        if self.wire not in WIRES:
            raise ConfigError(f"wire={self.wire!r}: known are {', '.join(WIRES)}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"wire_dtype={self.wire_dtype!r}: it must be {either(WIRE_DTYPES)}")
        if self.qkv_format not in ("bshd", "sbhd"):
            raise ConfigError(f"qkv_format={self.qkv_format!r}: it must be bshd, sbhd, bhsd or thd")
        if self.softmax_scale is not None and not 0 < self.softmax_scale < math.inf:
            raise ConfigError(
                f"softmax_scale={self.softmax_scale}: it must be a finite number above 0"
            )


class Inputs(NamedTuple):
    """The tensors of a call: q [b, s, h, d], k [b, s, g, d] and v [b, s, g, e], or tokens first as
    `qkv_format` says; sink [h].

    latents: the latents that k and v were made from, which travel with `wire="latent"`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    latents: Latents | None = None

    def alike(self) -> Inputs:
        """Return the inputs in one dtype if `torch.autocast` is in force."""
        if not torch.is_autocast_enabled(self.q.device.type):
            return self
        q, k, v, *more = in_one_dtype(self.q, self.k, self.v, *(self.latents or ()))
        return Inputs(q, k, v, self.sink, self.latents and type(self.latents)(*more))

    def kinds(self) -> tuple[object, ...]:
        """Return everything that an `Attention` depends on, without the values of the tensors."""
        tensors = (self.q, self.k, self.v, self.sink, *(self.latents or ()))
        return tuple([x is not None and (type(x), x.shape, x.dtype, x.device) for x in tensors])

    def check(self) -> None:
        """Raise `PlanError` for tensors that do not fit together."""
        q, k, v, sink, _ = self

        def shapes() -> str:
            return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

        if not q.dim() == k.dim() == v.dim() == 4:
            raise PlanError(
                "q, k and v must have 4 dimensions, batch, tokens, heads and head size; here "
                f"{shapes()}"
            )
        if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
            dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
            raise PlanError(
                f"q, k and v must share one floating-point dtype of 16 to 64 bits; here {dtypes}"
            )
        if not q.device == k.device == v.device:
            raise PlanError(
                f"q, k and v must be on one device; here {q.device}, {k.device}, {v.device}"
            )
        if 0 in (*q.shape[2:], *k.shape[2:], v.shape[3]):
            raise PlanError(
                f"q, k and v need at least one head, of size at least 1; here {shapes()}"
            )
        if (
            k.shape[:3] != v.shape[:3]
            or k.shape[:2] != q.shape[:2]
            or q.shape[3] != k.shape[3]
            or q.shape[2] % k.shape[2]
        ):
            raise PlanError(
                "batch sizes and tokens must agree (keys are those of the queries' tokens, without "
                "a cache), q and k must share a head size, key/value heads must divide query "
                f"heads; here {shapes()}"
            )
        if sink is not None and (
            sink.shape != q.shape[2:3] or not sink.is_floating_point() or sink.device != q.device
        ):
            raise PlanError(
                f"sink must hold one number for each of {q.shape[2]} query heads on {q.device}, "
                f"not {tuple(sink.shape)} of {sink.dtype} on {sink.device}"
            )


class Output(NamedTuple):
    """The results of a call: out [b, s, h, e] in the dtype of q and in its format; lse [b, h, s],
    None if heads were exchanged and lse is not wanted.

    max_logit: the largest logit of each query head in the tiles of this rank, float32 [h]; with the
    exchange of heads, -inf for the heads of other ranks. None if it is not wanted.
    parts: out and lse of the rings of each group of heads, before their exchange, for a
    recomputation.
    """

    out: Tensor
    lse: Tensor | None
    max_logit: Tensor | None
    parts: Sequence[tuple[Tensor, Tensor]]


class KeptOutput(NamedTuple):
    """`Output.parts` of a call, kept for its recomputation, and the place by which the watchdog
    names that call and the second one.

    A later call with the same inputs on every rank takes out and lse from it instead of computing
    and sending; its backward is the usual one.
    """

    parts: Sequence[tuple[Tensor, ...]]
    place: Place

    @classmethod
    def of(cls, output: Output) -> KeptOutput:
        """Keep copies of an output."""
        # Copies: the caller owns the tensors of the first run and may change them in place.
        parts = [tuple(x.detach().clone() for x in part) for part in output.parts]
        return cls(parts, WATCH.place)
