"""PyTorch's flash attention for the CPU: tiled, without a score matrix in memory; float32, float64,
bfloat16 and float16.

Its mask is full or causal (aligned top left). Queries, keys and values have one head size. The
adapter converts 16-bit types to float32 first: the operator would round its sums to 16 bits after
every block. Its float16 is many times slower, and its bfloat16 is faster in backward alone, by a
third.
"""

from __future__ import annotations

from typing import override

import torch
from torch import Tensor

from cp_ring.kernels.base import Capabilities, Gradients, OutLse
from cp_ring.kernels.window import cut, pad
from cp_ring.ops.dtypes import sum_dtype

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BLOCK = 1 << 21  # logits that are held at a time
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuKernel:
    """An `AttentionKernel` that computes and returns float32 (float64 for float64)."""

    name = "cpu"
    capabilities = Capabilities(deterministic=True)

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, the tensors are on {device}"
        return None if dtype in _DTYPES else f"does not know {dtype}"

    def max_logit_rejection(self) -> str | None:
        return None

    def with_max_logit(self) -> _CountingKernel:
        """Return a `CountingKernel` for tests, which computes the logits a second time, in
        blocks.
        """
        return _CountingKernel()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        e, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
        q, k, v = _prepared(width, q, k, v)
        out, lse = _attention(q, k, v, 0.0, hi == 0, scale=scale)
        return cut(out, e).transpose(1, 2), lse

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
        d, e, width = q.shape[-1], v.shape[-1], max(q.shape[-1], v.shape[-1])
        dout, q, k, v, out = _prepared(width, dout, q, k, v, out)
        grads = _attention_backward(dout, q, k, v, out, lse, 0.0, hi == 0, scale=scale)
        dq, dk, dv = [x.transpose(1, 2) for x in grads]
        return cut(dq, d), cut(dk, d), cut(dv, e)


def _prepared(width: int, *tensors: Tensor) -> list[Tensor]:
    """Return tensors with heads first, in float32 or 64, padded with zeros up to head size `width`.
    They change neither scores nor the kept outputs.
    """
    dtype = sum_dtype(tensors[-1].dtype)
    wide = [x if x.dtype == dtype else x.to(dtype) for x in tensors]
    return [pad(x, width).transpose(1, 2) for x in wide]


class _CountingKernel(CpuKernel):
    """A `CountingKernel` for tests."""

    max_logit: Tensor | None = None

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2).permute(0, 2, 3, 1).float()
        size = max(1, _BLOCK // (q.shape[0] * q.shape[2] * k.shape[1]))
        for start in range(0, q.shape[1], size):
            logits = q[:, start : start + size].transpose(1, 2).float() @ keys * scale
            if hi == 0:
                logits += torch.full(logits.shape[2:], -torch.inf).triu(start + 1)
            found = logits.amax((0, 2, 3))
            seen = self.max_logit
            self.max_logit = found if seen is None else torch.maximum(seen, found)
        return super().forward(q, k, v, lo=lo, hi=hi, scale=scale)


KERNEL = CpuKernel()
