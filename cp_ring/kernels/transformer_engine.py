"""The adapter of TransformerEngine's fused attention (cuDNN): float16 and bfloat16, full or causal
tiles, single or packed. Head sizes of keys and values may differ.

The parameters of its functions differ between versions, so values are bound by name to the
parameters of the installed version. TransformerEngine itself says which backend supports a call.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_ring.errors import KernelError
from cp_ring.kernels import te_library
from cp_ring.kernels.base import (
    Capabilities,
    Gradients,
    OutLse,
    Packing,
    deterministic,
    no_random_state,
)
from cp_ring.kernels.flash_aten import KERNEL as FLASH
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.te_library import Call
from cp_ring.kernels.te_sizes import FewSizes
from cp_ring.kernels.versions import compute_capability, cudnn_name, dense_backward_may_be_nan
from cp_ring.kernels.window import cut, pad
from cp_ring.ops.capture import capturing
from cp_ring.ops.copies import Copies
from cp_ring.runtime import RUNTIME

_BLOCK = 128
"""Tiles whose sizes are not multiples of this go to the function for packed tiles, as a packing of
one tile. cuDNN builds a plan for every size of a dense call, which takes long. `FewSizes` packs
such tiles of a ring already, in calls of few sizes."""

_ENDS = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
_TENSORS = "q", "k", "v", *_ENDS
"""The values that are new in every call; in dense calls the ends of sequences are not."""
_IN_BACKWARD = *_TENSORS, "o", "d_o", "aux_ctx_tensors"
_MAX_CALLS = 4096
"""The most kinds of calls that are remembered: packed documents keep bringing new ones."""


class _Bound(NamedTuple):
    """TransformerEngine's functions with all arguments but the tensors, and in packed calls the
    ends of sequences.
    """

    call: Call
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class TransformerEngineKernel:
    """An `AttentionKernel` and `VarlenKernel`; out and gradients have the input's dtype, lse has
    float32.
    """

    name = "transformer_engine"
    capabilities = Capabilities(varlen=True, deterministic=True)
    devices: tuple[str, ...] = ("cuda",)
    counts = False
    max_logit: Tensor | None = None
    _heads = 0

    def max_logit_rejection(self) -> str | None:
        library = te_library.installed()
        if isinstance(library, str):
            return library
        return te_library.max_logit_fault(library)

    def with_max_logit(self) -> TransformerEngineKernel:
        """Return a kernel for one call that keeps its largest logits. Its tiles go one by one: in
        packed calls that are filled up, the logits of tokens behind the last tile would count.
        """
        counting = copy(self)  # which shares what is known of calls
        counting.counts = True
        counting.capabilities = replace(self.capabilities, varlen=False)
        return counting

    def call_sizes(self, shard: int, packed: bool) -> FewSizes:
        return FewSizes(shard, packed)

    def __init__(self) -> None:
        self._backends: dict[Call, Any] = {}
        self._bound: dict[tuple[object, ...], _Bound | None] = {}
        self._widths: dict[tuple[torch.dtype, int, int, bool], tuple[int, int] | None] = {}

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type not in self.devices:
            return f"runs on CUDA, the tensors are on {device}"
        library = te_library.installed()
        if isinstance(library, str):
            return library
        if dtype not in (torch.float16, torch.bfloat16):
            return f"supports float16 and bfloat16, not {dtype}"
        fault = te_library.fault_of(library, compute_capability(device)[0])
        if fault:
            return f"{fault}; {library.version} and cuDNN {cudnn_name(library.cudnn)} are installed"
        exact = " under deterministic algorithms" if deterministic() else ""
        return (
            None
            if self._sizes(dtype, d, e)
            else f"has no fused backend for head sizes {d} and {e} in {dtype} here{exact}"
        )

    def varlen_rejection(self, dtype: torch.dtype, d: int, e: int) -> str | None:
        """Return why packed tiles are not supported, if they are not: before Hopper, cuDNN has
        none.
        """
        library, generation = te_library.loaded(), compute_capability(torch.device("cuda"))[0]
        if fault := te_library.packed_fault(library, generation, d, e):
            return fault
        packed = self._has_backend("thd", dtype, *(self._sizes(dtype, d, e) or (d, e)))
        return None if packed else f"has no fused backend for packed tiles in {dtype} here"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> OutLse:
        tensors = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if self.counts:
            self._heads = q.shape[2]
        if bound := self._dense(*tensors, hi == 0, scale):
            out, lse = self._attend(bound, *tensors)
            return out.transpose(0, 1), lse
        call = self._call(*tensors, "sbhd", hi == 0)
        if self._wants_packing(call):
            q_, k_, v_ = (x.flatten(1, 2) for x in tensors)
            out, lse = self.forward_varlen(q_, k_, v_, _single(call, q.device), scale)
            b, h = q.shape[0], q.shape[2]
            return out.unflatten(1, (b, h)).transpose(0, 1), lse.unflatten(0, (b, h))
        if self.counts:
            raise KernelError(
                "kernel='transformer_engine': largest logits of a tile of one token are unknown: a "
                "rank must hold at least two tokens of each chunk"
            )
        return REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)

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
        dout_, q_, k_, v_, out_ = [x.transpose(0, 1) for x in (dout, q, k, v, out)]
        if bound := self._dense(q_, k_, v_, hi == 0, scale):
            if dense_backward_may_be_nan(k.shape[1], hi == 0, q.device):
                return FLASH.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
            dq, dk, dv = self._gradients(bound, dout_, q_, k_, v_, out_, lse)
        else:
            call = self._call(q_, k_, v_, "sbhd", hi == 0)
            if not self._wants_packing(call):
                return REFERENCE.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
            packing = _single(call, q.device)
            dout_, q_, k_, v_, out_ = (x.flatten(1, 2) for x in (dout_, q_, k_, v_, out_))
            grads = self.backward_varlen(dout_, q_, k_, v_, out_, lse.flatten(0, 1), packing, scale)
            dq, dk, dv = (x.unflatten(1, (len(q), -1)) for x in grads)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> OutLse:
        bound = self._packed(q, k, v, packing, scale)
        if bound is None:
            return FLASH.forward_varlen(q, k, v, packing, scale)
        out, lse = self._attend(bound, q, k, v, **_ends(packing))
        return out, lse.transpose(0, 1)

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
        bound = self._packed(q, k, v, packing, scale)
        if bound is None:
            return FLASH.backward_varlen(dout, q, k, v, out, lse, packing, scale)
        ends = _ends(packing)
        return self._gradients(bound, dout, q, k, v, out, lse.transpose(0, 1), **ends)

    def _attend(self, bound: _Bound, q: Tensor, k: Tensor, v: Tensor, **ends: Tensor) -> OutLse:
        """Return out and lse of one call of TransformerEngine's forward, in its layout. ends: those
        of the sequences of a packed call.
        """
        out, aux, *more = bound.forward(**_ready(bound.call, q=q, k=k, v=v), **ends)
        if self.counts:
            self._count(more[0])
        return cut(out, v.shape[-1]), aux[0].squeeze(-1)

    def _count(self, largest: Tensor) -> None:
        """Keep the largest logits [h] that a call returns beside out and lse."""
        # batch rows of a tile that goes as a packing are further heads
        found = largest.float().unflatten(0, (-1, self._heads)).amax(0)
        seen = self.max_logit
        self.max_logit = found if seen is None else torch.maximum(seen, found)

    def _gradients(
        self,
        bound: _Bound,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        **ends: Tensor,
    ) -> Gradients:
        """Return dq, dk and dv of one call of TransformerEngine's backward."""
        aux = [lse.float().unsqueeze(-1).contiguous(), no_random_state((2,), q.device)]
        tensors = _ready(bound.call, q=q, k=k, v=v, o=out, d_o=dout)
        dq, dk, dv, *_ = bound.backward(aux_ctx_tensors=aux, **tensors, **ends)
        return cut(dq, q.shape[-1]), cut(dk, k.shape[-1]), cut(dv, v.shape[-1])

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> _Bound | None:
        """Return the functions for a dense call of tensors [s, b, h, d]; None if such a tile goes
        as a packing, or has one token.
        """
        # All that the call depends on: to make a `Call` takes the host longer.
        kind = q.dtype, q.device, causal, deterministic(), capturing(q.device), self.counts
        key = scale, q.shape, k.shape, v.shape, *kind
        if key not in self._bound:
            call = self._call(q, k, v, "sbhd", causal)
            dense = min(call.queries, call.keys) > 1 and not self._wants_packing(call)
            self._keep(key, self._functions(call, scale, q.device) if dense else None)
        return self._bound[key]

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> _Bound | None:
        """Return the functions for a packed call of tensors [t, h, d], None if there are none."""
        call = self._call(q, k, v, "thd", packing.right == 0, packing)
        key = scale, call, q.device, capturing(q.device)
        if key not in self._bound:
            known = self._backend(call) is not None
            self._keep(key, self._functions(call, scale, q.device) if known else None)
        return self._bound[key]

    def _keep(self, key: tuple[object, ...], bound: _Bound | None) -> None:
        if len(self._bound) > _MAX_CALLS:
            self._bound.clear()
        self._bound[key] = bound

    def _functions(self, call: Call, scale: float, device: torch.device) -> _Bound:
        """Bind all arguments of a call but the tensors."""
        backend, library = self._backend(call), te_library.loaded()
        if backend is None:
            raise KernelError(f"kernel='transformer_engine': no fused backend for {call._asdict()}")
        values = {
            "max_seqlen_q": call.queries,
            "max_seqlen_kv": call.keys,
            "fake_dtype": call.dtype,
            "fused_attention_backend": backend,
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": call.qkv_layout,
            "dqkv_layout": call.qkv_layout,
            "o_format": call.layout,
            "do_format": call.layout,
            "attn_bias_type": "no_bias",
            "attn_mask_type": call.mask,
            "softmax_type": "vanilla",
            "window_size": call.window,
            "bottom_right_diagonal": False,
        }
        forward = values | {
            "is_training": True,
            "return_max_logit": call.max_logit,
            "rng_gen": _generator(device, capturing(device)),
        }
        backward = values | {
            "dqkv_dtype": library.dtypes[call.dtype],
            "deterministic": call.deterministic,
        }
        ends = {} if call.layout == "thd" else _even_ends(call, device)
        return _Bound(
            call,
            partial(te_library.partial_of(library.forward, forward, _TENSORS), **ends),
            partial(te_library.partial_of(library.backward, backward, _IN_BACKWARD), **ends),
        )

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: str,
        causal: bool,
        packing: Packing | None = None,
    ) -> Call:
        """Return the call for tensors [s, b, h, d], or [t, h, d] with a packing."""
        d, e = self._sizes(q.dtype, q.shape[-1], v.shape[-1]) or (q.shape[-1], v.shape[-1])
        if packing:
            # The largest sizes may be rounded up, which makes fewer kinds of calls.
            queries, keys = (-(-x // _BLOCK) * _BLOCK for x in (packing.max_q, packing.max_k))
            more = len(packing.cu_q) - 1, len(q), len(k)
        else:
            queries, keys, more = len(q), len(k), (q.shape[1], 0, 0)
        heads = q.shape[-2], k.shape[-2]
        sizes = *heads, queries, keys, d, e
        kind = layout, causal, q.dtype
        return Call(*kind, *sizes, deterministic(), *more, max_logit=self.counts)

    def _wants_packing(self, call: Call) -> bool:
        if call.queries % _BLOCK == call.keys % _BLOCK == 0:
            return False
        packed = call._replace(layout="thd", tokens_q=call.queries, tokens_k=call.keys)
        return self._backend(packed) is not None

    def _sizes(self, dtype: torch.dtype, d: int, e: int) -> tuple[int, int] | None:
        """Return the head sizes of the call: multiples of 8, or one size for both if two sizes have
        no backend; None if neither has one.
        """
        key = (dtype, d, e, deterministic())
        if key not in self._widths:
            d8, e8 = (-(-x // 8) * 8 for x in (d, e))
            found = ((d8, e8), (max(d8, e8), max(d8, e8)))
            self._widths[key] = next(
                (sizes for sizes in found if self._has_backend("sbhd", dtype, *sizes)), None
            )
        return self._widths[key]

    def _has_backend(self, layout: str, dtype: torch.dtype, d: int, e: int) -> bool:
        """Return True if full and causal tiles of a layout have a backend."""
        tokens = (1024, 1024) if layout == "thd" else (0, 0)
        sizes = dtype, 8, 8, 1024, 1024, d, e, deterministic(), 1, *tokens
        calls = (Call(layout, causal, *sizes) for causal in (False, True))
        return all(self._backend(call) is not None for call in calls)

    def _backend(self, call: Call) -> Any:
        """Return the fused backend that TransformerEngine names for the call; None if there is
        none.
        """
        if call not in self._backends:
            if len(self._backends) > _MAX_CALLS:
                self._backends.clear()
            backend = te_library.ask(te_library.loaded(), call)
            self._backends[call] = (
                None if int(backend) == int(te_library.loaded().backends["No_Backend"]) else backend
            )
        return self._backends[call]


@RUNTIME.cache(maxsize=16)
def _generator(device: torch.device, in_graph: bool) -> torch.Generator | None:
    """Return a separate generator for TransformerEngine, which advances one in every forward call
    even if dropout is 0.

    With the default generator, hidden dropout would get other numbers when a recomputation skips
    attention. A CUDA graph takes only generators that were registered with it, and only the default
    one (None) is known to be.
    """
    return None if in_graph else torch.Generator(device)


def _ready(call: Call, **tensors: Tensor) -> dict[str, Tensor]:
    """Return tensors as the library reads them: contiguous, and padded to the call's head sizes."""
    return {
        name: pad(x, call.d if name in ("q", "k") else call.e).contiguous()
        for name, x in tensors.items()
    }


def _even_ends(call: Call, device: torch.device) -> dict[str, Tensor | None]:
    """Return the ends of the sequences of a dense call."""
    ends = (_even(size, call.batch).on(device) for size in (call.queries, call.keys))
    return dict(zip(_ENDS, (*ends, None, None), strict=True))


def _ends(packing: Packing) -> dict[str, Tensor]:
    """Return the ends of packed tiles, which lie end to end."""
    return dict(zip(_ENDS, (packing.cu_q, packing.cu_k) * 2, strict=True))


@RUNTIME.cache(maxsize=4096)
def _even(size: int, count: int) -> Copies:
    """Return the ends of `count` sequences of one size, int32 [count + 1]; made once."""
    return Copies(np.arange(0, (count + 1) * size, size, dtype=np.int32))


def _single(call: Call, device: torch.device) -> Packing:
    """Return one tile as a packing; batch rows become heads."""
    of_q, of_k = (_even(size, 1).on(device) for size in (call.queries, call.keys))
    return Packing(of_q, of_k, call.queries, call.keys, -1, 0 if call.causal else -1)


KERNEL = RUNTIME.keep(TransformerEngineKernel())
