"""cuDNN's attention through PyTorch's own operator: float16 and bfloat16, full or causal, key and
value head sizes may differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_ring.kernels.base import no_random_state
from cp_ring.kernels.flash_aten import KERNEL as FLASH
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.versions import compute_capability, dense_backward_may_be_nan
from cp_ring.kernels.window import pad
from cp_ring.plan.lower import KERNELS

_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnKernel:
    """Follows `AttentionKernel`; out and gradients have the input's dtype, lse has float32.

    Its backward is not deterministic. Other kernels compute what cuDNN cannot: the reference kernel
    computes tiles of one query or one key, and PyTorch's flash attention the gradients that may be
    NaN (see `dense_backward_may_be_nan`).
    """

    name = "cudnn"
    capabilities = KERNELS["cudnn"]
    # The operator's lse has 4 dimensions [b, h, s, 1] in some versions of torch, 3 in others.
    # `forward` finds out.
    _lse_dims = 4

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "needs a torch built with cuDNN"
        # The limits are those of backward: 256 on Hopper only, and (192, 128) on Hopper and later.
        generation = compute_capability(device)[0]
        limit = 256 if generation == 9 and d == e else 128
        if max(d, e) <= limit or ((d, e) == (192, 128) and generation >= 9):
            return None
        return (
            f"knows head sizes up to {limit}{', and 192 with 128' if generation >= 9 else ''} "
            f"here, not {d} and {e}"
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        if min(q.shape[1], k.shape[1]) < 2:
            return REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)
        e = v.shape[-1]
        q, k, v = (_heads_first(x) for x in (q, k, v))
        out, lse, *_ = _attention(q, k, v, None, True, 0.0, hi == 0, False, scale=scale)
        self._lse_dims = lse.dim()
        return out.transpose(1, 2)[..., :e], lse.view(lse.shape[:3])

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
        if min(q.shape[1], k.shape[1]) < 2:
            return REFERENCE.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        d, e, queries, keys = q.shape[-1], v.shape[-1], q.shape[1], k.shape[1]
        if dense_backward_may_be_nan(keys, hi == 0, q.device):
            return FLASH.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        # cuDNN does not know strides of 0. The gradient of a sum has them: it is one number,
        # expanded.
        dout = dout if all(dout.stride()) else dout.contiguous()
        dout, q, k, v, out = (_heads_first(x) for x in (dout, q, k, v, out))
        lse = lse.float().contiguous()
        lse = lse[..., None] if self._lse_dims == 4 else lse
        state = no_random_state((), q.device)
        grads = _attention_backward(
            dout, q, k, v, out, lse, state, state, None, None, None,
            queries, keys, 0.0, hi == 0, scale=scale
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq[..., :d], dk[..., :d], dv[..., :e]


def _heads_first(x: Tensor) -> Tensor:
    """[b, s, h, d] as the operator wants it: [b, h, s, d], d padded to a multiple of 8."""
    return pad(x, -(-x.shape[-1] // 8) * 8).transpose(1, 2)


KERNEL = CudnnKernel()
