"""The flash attention that comes with PyTorch for CUDA: float16 and bfloat16, full or causal, one head size of at most 256."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.plan.lower import Capabilities

_forward = torch.ops.aten._scaled_dot_product_flash_attention
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_MAX_HEAD_SIZE = 256


class FlashAtenKernel:
    """Follows `AttentionKernel`; out and gradients come in the input's dtype, lse in float32."""

    name = "flash_aten"
    capabilities = Capabilities()

    def refusal(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        return None if max(d, e) <= _MAX_HEAD_SIZE else f"knows head sizes up to {_MAX_HEAD_SIZE}, not {max(d, e)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> tuple[Tensor, Tensor]:
        e, width = v.shape[-1], _width(q, v)
        q, k, v = (_padded(x, width) for x in (q, _repeat(k, q), _repeat(v, q)))
        out, lse, *_ = _forward(q, k, v, 0.0, hi == 0, scale=scale)
        return out.transpose(1, 2)[..., :e], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        d, e, width, groups = q.shape[-1], v.shape[-1], _width(q, v), k.shape[2]
        rows, columns = q.shape[1], k.shape[1]
        dout, q, k, v, out = (_padded(x, width) for x in (dout, q, _repeat(k, q), _repeat(v, q), out))
        # Random state of dropout, which is off.
        seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
        grads = _backward(
            dout, q, k, v, out, lse.contiguous(), None, None, rows, columns, 0.0, hi == 0, seed, offset, scale=scale
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq[..., :d], _sum(dk[..., :d], groups), _sum(dv[..., :e], groups)


def _width(q: Tensor, v: Tensor) -> int:
    """The kernel wants one head size for all, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _padded(x: Tensor, width: int) -> Tensor:
    """[b, s, h, d] to the kernel's [b, h, s, width], zeros behind."""
    return (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))).transpose(1, 2)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Key/value heads repeated for their query heads: this operator's backward wants as many."""
    return x if x.shape[2] == q.shape[2] else x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def _sum(x: Tensor, groups: int) -> Tensor:
    """The query heads of one key/value head added, in float32 where there are several."""
    return x if x.shape[2] == groups else x.unflatten(2, (groups, -1)).float().sum(3)


KERNEL = FlashAtenKernel()
