"""PyTorch's memory-efficient attention for CUDA: float16 and bfloat16, full or causal, heads of any
size, such as 512.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.kernels.base import Capabilities, Gradients, OutLse, deterministic, no_random_state
from cp_ring.kernels.window import cut, pad

_attention = torch.ops.aten._efficient_attention_forward
_attention_backward = torch.ops.aten._efficient_attention_backward
_ROWS = 32  # the operator's lse has a multiple of so many queries


class EfficientKernel:
    """An `AttentionKernel`; out and gradients have the input's dtype, lse has float32.

    The operator wants as many key/value heads as query heads, so it gets copies of them.
    """

    name = "efficient"
    capabilities = Capabilities(deterministic=True)

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"supports float16 and bfloat16, not {dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        e, queries = v.shape[-1], q.shape[1]
        q, k, v = _alike(q, k, v)
        out, lse, *_ = _attention(
            q, k, v, None, None, None, None, None, 0.0, int(hi == 0), True, scale=scale
        )
        return cut(out, e), lse[..., :queries]

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
        d, e, groups, queries, keys = q.shape[-1], v.shape[-1], k.shape[2], q.shape[1], k.shape[1]
        q, k, v = _alike(q, k, v)
        dout, out = (pad(x, v.shape[-1]).contiguous() for x in (dout, out))
        lse = F.pad(lse.float(), (0, -queries % _ROWS), value=torch.inf)
        state = no_random_state((), q.device)
        dq, dk, dv, _ = _attention_backward(
            dout,
            q,
            k,
            v,
            None,
            out,
            None,
            None,
            queries,
            keys,
            lse,
            0.0,
            state,
            state,
            int(hi == 0),
            False,
            scale=scale,
            num_splits_key=1 if deterministic() else None,
        )
        if k.shape[2] > groups:
            dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
        return cut(dq, d), cut(dk, d), cut(dv, e)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Repeat key/value heads up to the heads of `q`, and pad head sizes to multiples of 8."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
    return tuple(pad(x, -(-x.shape[-1] // 8) * 8) for x in (q, k, v))


KERNEL = EfficientKernel()
