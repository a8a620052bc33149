"""The flash attention that comes with PyTorch for CUDA: float16 and bfloat16, windows, packed
tiles, head sizes up to 256.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cp_ring.kernels.base import Packing, deterministic, no_random_state
from cp_ring.kernels.window import Window, WindowKernel

_attention = torch.ops.aten._flash_attention_forward
_attention_backward = torch.ops.aten._flash_attention_backward
_MAX_HEAD_SIZE = 256


class FlashAtenKernel(WindowKernel):
    """Follows `AttentionKernel` and `VarlenKernel`; out and gradients have the input's dtype, lse
    has float32.
    """

    name = "flash_aten"

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA, the tensors are on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        return (
            None
            if max(d, e) <= _MAX_HEAD_SIZE
            else f"knows head sizes up to {_MAX_HEAD_SIZE}, not {max(d, e)}"
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = (no_random_state(shape, q.device).view(torch.uint64) for shape in ((2,), ()))
        lengths = _lengths(q, k, window.packing)
        with _exact() if deterministic() else nullcontext():
            dq, dk, dv = _attention_backward(
                dout, q, k, v, out, lse, *lengths, 0.0, False, *state, **_named(window)
            )
        return dq, dk, dv


_switch = threading.Lock()


@contextmanager
def _exact() -> Iterator[None]:
    """Turns torch's deterministic switch on in the block, which is the only one that the operator
    reads.

    With it torch would fill each tensor that the operator allocates, 8 kernels a call, although all
    of them are written. The switches are global, so one thread at a time enters.
    """
    with _switch:
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        switches: Any = torch.utils.deterministic  # a module that is an object
        filled = switches.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        switches.fill_uninitialized_memory = False
        try:
            yield
        finally:
            switches.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _named(window: Window) -> dict[str, Any]:
    left, right, _, scale = window
    return {"window_size_left": left, "window_size_right": right, "scale": scale}


def _lengths(
    q: Tensor, k: Tensor, packing: Packing | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """cum_seq_q, cum_seq_k, max_q, max_k."""
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    return packing.cu_q, packing.cu_k, packing.max_q, packing.max_k


KERNEL = FlashAtenKernel()
