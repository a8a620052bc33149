"""cuDNN's attention through PyTorch's own operator: float16 and bfloat16, full or causal, key and value head sizes may differ."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_ring.kernels.base import no_random_state
from cp_ring.kernels.reference import KERNEL as SMALL
from cp_ring.kernels.window import pad
from cp_ring.plan.lower import Capabilities

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel:
    """Follows `AttentionKernel`; out and gradients come in the input's dtype, lse in float32.

    Its backward is not deterministic. Tiles of one row or one column, which cuDNN does not know, are plain matrix products
    in float64.
    """

    name = "cudnn"
    capabilities = Capabilities()
    # The operator's statistics are [b, h, s, 1] in some versions of torch, [b, h, s] in others; forward tells.
    _stats_dims = 4

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "needs a torch built with cuDNN"
        # Backward is the narrow part: up to 256 on Hopper alone, and (192, 128) since Hopper.
        generation = torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 9
        limit = 256 if generation == 9 and d == e else 128
        if max(d, e) <= limit or ((d, e) == (192, 128) and generation >= 9):
            return None
        return f"knows head sizes up to {limit}{', and 192 with 128' if generation >= 9 else ''} here, not {d} and {e}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> tuple[Tensor, Tensor]:
        if min(q.shape[1], k.shape[1]) < 2:
            return SMALL.forward(q, k, v, lo=lo, hi=hi, scale=scale)
        e = v.shape[-1]
        q, k, v = (_heads_first(x) for x in (q, k, v))
        out, lse, *_ = _forward(q, k, v, None, True, 0.0, hi == 0, False, scale=scale)
        self._stats_dims = lse.dim()
        return out.transpose(1, 2)[..., :e], lse.view(lse.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if min(q.shape[1], k.shape[1]) < 2:
            return SMALL.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        d, e, rows, columns = q.shape[-1], v.shape[-1], q.shape[1], k.shape[1]
        # The gradient of a sum, say, is one number seen as a tensor: strides of 0, which cuDNN does not know.
        dout = dout if all(dout.stride()) else dout.contiguous()
        dout, q, k, v, out = (_heads_first(x) for x in (dout, q, k, v, out))
        stats = lse.float().contiguous()
        stats = stats[..., None] if self._stats_dims == 4 else stats
        state = no_random_state((), q.device)
        grads = _backward(
            dout, q, k, v, out, stats, state, state, None, None, None, rows, columns, 0.0, hi == 0, scale=scale
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq[..., :d], dk[..., :d], dv[..., :e]


def _heads_first(x: Tensor) -> Tensor:
    """[b, s, h, d] to the operator's [b, h, s, d], with head sizes that are multiples of 8."""
    return pad(x, -(-x.shape[-1] // 8) * 8).transpose(1, 2)


KERNEL = CudnnKernel()
