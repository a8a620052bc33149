"""The flash attention that comes with PyTorch for CUDA: float16 and bfloat16, windows, packed
tiles, head sizes up to 256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_ring.errors import KernelError
from cp_ring.kernels.base import (
    Gradients,
    OutLse,
    Packing,
    deterministic,
    no_random_state,
    switched,
)
from cp_ring.kernels.window import Window, WindowKernel

_attention = torch.ops.aten._flash_attention_forward
_attention_backward = torch.ops.aten._flash_attention_backward
_MAX_HEAD_SIZE = 256
_ONLY_BY_SWITCH = "is deterministic under torch.use_deterministic_algorithms(True) alone"


class FlashAtenKernel(WindowKernel):
    """An `AttentionKernel` and `VarlenKernel`; out and gradients have the input's dtype, lse has
    float32.
    """

    name = "flash_aten"

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"supports float16 and bfloat16, not {dtype}"
        if max(d, e) > _MAX_HEAD_SIZE:
            return f"supports head sizes up to {_MAX_HEAD_SIZE}, not {max(d, e)}"
        return _ONLY_BY_SWITCH if _lacks_switch() else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> OutLse:
        out, lse, *_ = _attention(
            q, k, v, *_lengths(q, k, window.packing), 0.0, False, False, **_named(window)
        )
        return out, lse

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
        if _lacks_switch():  # another kernel leaves such a call to this one
            raise KernelError(f"kernel='flash_aten': {_ONLY_BY_SWITCH}")
        state = (no_random_state(shape, q.device).view(torch.uint64) for shape in ((2,), ()))
        lengths = _lengths(q, k, window.packing)
        dq, dk, dv = _attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, False, *state, **_named(window)
        )
        return dq, dk, dv


def _lacks_switch() -> bool:
    """Return True if the call asks for determinism, but torch's switch is off. The operator reads
    only torch's switch, which holds for the whole process: turning it on for one backward would
    affect other threads.
    """
    return deterministic() and not switched()


def _named(window: Window) -> dict[str, Any]:
    left, right, _, scale = window
    return {"window_size_left": left, "window_size_right": right, "scale": scale}


def _lengths(
    q: Tensor, k: Tensor, packing: Packing | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return cum_seq_q, cum_seq_k, max_q and max_k."""
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    return packing.cu_q, packing.cu_k, packing.max_q, packing.max_k


KERNEL = FlashAtenKernel()
