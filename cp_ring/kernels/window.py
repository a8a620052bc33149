"""The parts that the flash-attn kernels share: bands as windows aligned bottom right, padded head
sizes, and queries that see no key.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.kernels.base import Capabilities, Packing


class LivePart(NamedTuple):
    """The part of a tile in which every query sees a key, and its band as a window; -1 leaves a
    side unbounded.
    """

    q: slice
    k: slice
    left: int
    right: int

    def window(self, scale: float) -> Window:
        return Window(self.left, self.right, None, scale)


def live_part(queries: int, keys: int, lo: int, hi: int) -> LivePart | None:
    """Return the part of a tile with band [lo, hi] that is computed; None if no query sees a
    key.
    """
    q0, q1 = max(0, -hi), min(queries, keys - lo)
    k0, k1 = max(0, q0 + lo), min(keys, q1 + hi)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return None
    first, last = lo - (k0 - q0), hi - (k0 - q0)
    height, width = q1 - q0, k1 - k0
    left = -1 if first <= 1 - height else width - height - first
    right = -1 if last >= width - 1 else last - (width - height)
    return LivePart(slice(q0, q1), slice(k0, k1), left, right)


class Window(NamedTuple):
    """The arguments of a library's call beside tensors: the window, aligned bottom right, with -1
    for an open side; the packing of many tiles; and the scale of scores.
    """

    left: int
    right: int
    packing: Packing | None
    scale: float


class WindowKernel(ABC):
    """Base of kernels (`AttentionKernel` and `VarlenKernel`) whose libraries align windows bottom
    right.

    A subclass calls its library in `attend` and `gradients`. They get tensors [b, s, h, d], or [t,
    h, d] with a packing, whose head sizes are those that `head_sizes` returns.
    """

    capabilities = Capabilities(bands=True, varlen=True, deterministic=True)

    def head_sizes(self, d: int, e: int) -> tuple[int, int]:
        """Return the head sizes of the library's calls, which are padded with zeros: here one size
        for both, a multiple of 8.
        """
        width = -(-max(d, e) // 8) * 8
        return width, width

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Return out, and lse [b, h, s] or [h, t]."""

    @abstractmethod
    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv from the merged out and lse."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        b, queries, h, _ = q.shape
        live = live_part(queries, k.shape[1], lo, hi)
        if live and live.q == slice(0, queries):
            return self._attend_padded(q, k[:, live.k], v[:, live.k], live.window(scale))
        out = q.new_zeros((b, queries, h, v.shape[-1]))
        lse = q.new_full((b, h, queries), -math.inf, dtype=torch.float32)
        if live:
            part = self._attend_padded(q[:, live.q], k[:, live.k], v[:, live.k], live.window(scale))
            out[:, live.q], lse[:, :, live.q] = part
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        lo: int,
        hi: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        live = live_part(q.shape[1], k.shape[1], lo, hi)
        if live and live.q == slice(0, q.shape[1]) and live.k == slice(0, k.shape[1]):
            return self._gradients_padded(dout, q, k, v, out, lse, live.window(scale))
        grads = tuple(x.new_zeros(x.shape) for x in (q, k, v))
        if live:
            do, qs, o = (x[:, live.q] for x in (dout, q, out))
            ks, vs = k[:, live.k], v[:, live.k]
            part = self._gradients_padded(do, qs, ks, vs, o, lse[..., live.q], live.window(scale))
            for grad, tokens, x in zip(grads, (live.q, live.k, live.k), part, strict=True):
                grad[:, tokens] = x
        return grads[0], grads[1], grads[2]

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._attend_padded(q, k, v, Window(packing.left, packing.right, packing, scale))

    def backward_varlen(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packing: Packing,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        window = Window(packing.left, packing.right, packing, scale)
        return self._gradients_padded(dout, q, k, v, out, lse, window)

    def _attend_padded(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        e = v.shape[-1]
        width, value_width = self.head_sizes(q.shape[-1], e)
        out, lse = self.attend(pad(q, width), pad(k, width), pad(v, value_width), window)
        return out[..., :e], lse

    def _gradients_padded(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, e = q.shape[-1], v.shape[-1]
        width, value_width = self.head_sizes(d, e)
        q, k = (pad(x, width) for x in (q, k))
        dout, v, out = (pad(x, value_width) for x in (dout, v, out))
        dq, dk, dv = self.gradients(dout, q, k, v, out, lse.contiguous(), window)
        return dq[..., :d], dk[..., :d], dv[..., :e]


def pad(x: Tensor, width: int) -> Tensor:
    """Pad x with zeros up to head size `width`; they change neither scores nor kept outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
