"""TransformerEngine, the operators of torch for attention, and flash-attn on the CPU,
as their adapters call them.

The adapters compute bands, padding, packing and layouts as on a GPU. The libraries behind them are
plain products.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cp_ring.kernels import REGISTRY, _chosen, efficient, flash_aten
from cp_ring.kernels.base import OPEN, Packing, deterministic
from cp_ring.kernels.reference import KERNEL as REFERENCE
from tests.kernels import emulated_te
from tests.kernels.test_flash import stand_in

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class _OnCpu:
    def rejection(self, device: torch.device, *kind: Any) -> str | None:
        return super().rejection(CUDA if device.type == "cpu" else device, *kind)  # type: ignore[misc, no-any-return]


class FlashAten(_OnCpu, flash_aten.FlashAtenKernel): ...


class Efficient(_OnCpu, efficient.EfficientKernel): ...


def _packing(q: Tensor, k: Tensor, lengths: tuple[Any, ...], window: dict[str, int]) -> Packing:
    left, right = window["window_size_left"], window["window_size_right"]
    cu_q, cu_k, max_q, max_k = lengths
    if cu_q is None:
        cu_q, cu_k = (
            torch.arange(0, (len(q) + 1) * x, x, dtype=torch.int32) for x in (max_q, max_k)
        )
    return Packing(cu_q, cu_k, max_q, max_k, left, right)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
                   dropout: float, causal: bool, debug: bool, *, scale: float, **window: int) -> tuple[Tensor, ...]:  # fmt: skip
    """Tensors [b, s, heads, size], lse [b, h, s]; with offsets [t, heads, size] and [h, t]."""
    flat = [x.flatten(0, 1) for x in (q, k, v)] if cu_q is None else [q, k, v]
    out, lse = REFERENCE.forward_varlen(
        *flat, _packing(q, k, (cu_q, cu_k, max_q, max_k), window), scale
    )
    if cu_q is None:
        out, lse = (
            out.unflatten(0, q.shape[:2]),
            lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous(),
        )
    return out.to(q.dtype), lse.float()


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
                    cu_k: Tensor | None, max_q: int, max_k: int, *rest: Any, scale: float,
                    **window: int) -> list[Tensor]:  # fmt: skip
    packing = _packing(q, k, (cu_q, cu_k, max_q, max_k), window)
    tensors = dout, q, k, v, out
    if cu_q is None:
        lse = lse.transpose(0, 1).flatten(1, 2)
        tensors = tuple(x.flatten(0, 1) for x in tensors)
    grads = REFERENCE.backward_varlen(*tensors, lse, packing, scale)
    return [x.reshape(like.shape).to(like.dtype) for x, like in zip(grads, (q, k, v), strict=True)]


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    """Tensors [b, s, heads, size] of as many heads; lse [b, h, a multiple of 32]."""
    assert q.shape[2] == k.shape[2] and q.shape[3] % 8 == v.shape[3] % 8 == 0
    assert rest[:6] == (None,) * 5 + (0.0,) and rest[7]
    out, lse = REFERENCE.forward(q, k, v, lo=-OPEN, hi=0 if rest[6] else OPEN, scale=scale)
    lse = torch.nn.functional.pad(lse.float(), (0, -lse.shape[2] % 32), value=torch.nan)
    return out.to(q.dtype), lse


def _efficient_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *rest: Any,
                        scale: float, num_splits_key: int | None) -> tuple[Tensor | None, ...]:  # fmt: skip
    (_, _, queries, keys, lse), causal = rest[:5], rest[8]
    assert (queries, keys, lse.shape[2] % 32) == (q.shape[1], k.shape[1], 0)
    assert num_splits_key == (1 if deterministic() else None)
    band = {"lo": -OPEN, "hi": 0 if causal else OPEN, "scale": scale}
    grads = REFERENCE.backward(dout, q, k, v, out, lse[..., :queries], **band)
    return *(x.to(q.dtype) for x in grads), None


@contextmanager
def emulated() -> Iterator[None]:
    """In the block, the kernels of a GPU run on the CPU in float16 and bfloat16."""
    kernels = {
        "flash": stand_in("3: flash-attn August 2026"),
        "flash_aten": FlashAten(),
        "efficient": Efficient(),
    }
    homes = {f"{__name__}.{name}": types.ModuleType(name) for name in kernels}
    for home, kernel in zip(homes.values(), kernels.values(), strict=True):
        home.KERNEL = kernel  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(emulated_te.installed("2.20.2"))
        stack.enter_context(
            mock.patch.dict(REGISTRY, {name: f"{__name__}.{name}" for name in kernels})
        )
        sys.modules.update(homes)  # they stay: modules that are imported in the block must too
        for module, forward, backward in (
            (flash_aten, _flash_forward, _flash_backward),
            (efficient, _efficient_forward, _efficient_backward),
        ):
            stack.enter_context(mock.patch.object(module, "_attention", forward))
            stack.enter_context(mock.patch.object(module, "_attention_backward", backward))
        stack.callback(_chosen.cache_clear)
        _chosen.cache_clear()
        yield
