"""The parts that the flash-attn kernels share: bands as windows aligned bottom right, and padded
head sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cp_ring.kernels.base import Capabilities, Gradients, OutLse, Packing


class Window(NamedTuple):
    """The arguments of a library's call beside tensors: the window, aligned bottom right, with -1
    for an open side; the packing of many tiles; and the scale of scores.
    """

    left: int
    right: int
    packing: Packing | None
    scale: float

    @classmethod
    def of(cls, queries: int, keys: int, lo: int, hi: int, scale: float) -> Window:
        """Make the window of a tile with band [lo, hi] in which every query sees a key."""
        corner = keys - queries
        left = -1 if lo <= 1 - queries else corner - lo
        right = -1 if hi >= keys - 1 else hi - corner
        return cls(left, right, None, scale)


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
    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> OutLse:
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
    ) -> Gradients:
        """Return dq, dk and dv from the merged out and lse."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        window = Window.of(q.shape[1], k.shape[1], lo, hi, scale)
        return self._attend_padded(q, k, v, window)

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
    ) -> Gradients:
        window = Window.of(q.shape[1], k.shape[1], lo, hi, scale)
        return self._gradients_padded(dout, q, k, v, out, lse, window)

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> OutLse:
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
    ) -> Gradients:
        window = Window(packing.left, packing.right, packing, scale)
        return self._gradients_padded(dout, q, k, v, out, lse, window)

    def _attend_padded(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> OutLse:
        e = v.shape[-1]
        width, value_width = self.head_sizes(q.shape[-1], e)
        out, lse = self.attend(pad(q, width), pad(k, width), pad(v, value_width), window)
        return cut(out, e), lse

    def _gradients_padded(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        window: Window,
    ) -> Gradients:
        d, e = q.shape[-1], v.shape[-1]
        width, value_width = self.head_sizes(d, e)
        q, k = (pad(x, width) for x in (q, k))
        dout, v, out = (pad(x, value_width) for x in (dout, v, out))
        dq, dk, dv = self.gradients(dout, q, k, v, out, lse.contiguous(), window)
        return cut(dq, d), cut(dk, d), cut(dv, e)


def pad(x: Tensor, width: int) -> Tensor:
    """Pad x with zeros up to head size `width`; they change neither scores nor kept outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def cut(x: Tensor, width: int) -> Tensor:
    """Return x without what `pad` added."""
    return x if x.shape[-1] == width else x[..., :width]
