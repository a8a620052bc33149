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
from cp_ring.kernels.base import Capabilities, Packing, deterministic, no_random_state
from cp_ring.kernels.flash_aten import KERNEL as FLASH
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.te_library import Call
from cp_ring.kernels.te_sizes import FewSizes
from cp_ring.kernels.versions import compute_capability, cudnn_name, dense_backward_may_be_nan
from cp_ring.kernels.window import pad
from cp_ring.ops.capture import capturing
from cp_ring.ops.copies import Copies
from cp_ring.runtime import RUNTIME

_BLOCK = 128
"""Tiles whose sizes are not multiples of this go to the function for packed tiles, as a packing of
one tile. cuDNN builds a plan for every size of a dense call, which takes long. `FewSizes` packs
such tiles of a ring already, in calls of few sizes."""

# The values that are new in every call.
_TENSORS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)
_MORE_TENSORS = ("o", "d_o", "aux_ctx_tensors")
_IN_BACKWARD = ("q", "k", "v", "o", "d_o")
_MAX_CALLS = 4096
"""The most kinds of calls that are remembered: packed documents keep bringing new ones."""


class _Bound(NamedTuple):
    """TransformerEngine's functions with all arguments but the tensors; in `_dense`, the ends of
    sequences are bound too.

    `backward` is None if another kernel computes it.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


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
        self._bound: dict[tuple[Call, float, torch.device, bool], _Bound] = {}
        self._dense: dict[tuple[object, ...], _Bound] = {}
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
        return (
            None
            if self._has_packed(dtype, d, e)
            else f"has no fused backend for packed tiles in {dtype} here"
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if self.counts:
            self._heads = q.shape[2]
        bound = self._dense.get(self._key(q_, k_, v_, hi, scale))
        if bound is not None:
            out, aux, *more = bound.forward(q=q_.contiguous(), k=k_.contiguous(), v=v_.contiguous())
            self._count(more)
            return out.transpose(0, 1), aux[0].squeeze(3)
        call = self._call(q_, k_, v_, "sbhd", hi == 0)
        if self._wants_packing(call):
            packing = _single(call.queries, call.keys, hi == 0, q.device)
            out, lse = self.forward_varlen(
                q_.flatten(1, 2), k_.flatten(1, 2), v_.flatten(1, 2), packing, scale
            )
            b, h = q.shape[0], q.shape[2]
            return out.unflatten(1, (b, h)).transpose(0, 1), lse.unflatten(0, (b, h))
        if min(call.queries, call.keys) < 2:
            if self.counts:
                raise KernelError(
                    "kernel='transformer_engine': largest logits of a tile of one token are "
                    "unknown: a rank must hold at least two tokens of each chunk"
                )
            return REFERENCE.forward(q, k, v, lo=lo, hi=hi, scale=scale)
        ends = _even_ends(call, len(q), q.device)
        if (call.d, call.e) == (q.shape[-1], v.shape[-1]):  # else head sizes are padded
            self._bind(self._key(q_, k_, v_, hi, scale), call, ends, q.device)
        out, stats = self._attend(call, q_, k_, v_, ends, scale)
        return out[..., : v.shape[-1]].transpose(0, 1), stats[..., 0]

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
        dout_, q_, k_, v_, out_ = [x.transpose(0, 1) for x in (dout, q, k, v, out)]
        bound = self._dense.get(self._key(q_, k_, v_, hi, scale))
        if bound is not None and bound.backward is not None:
            aux = [lse.float().unsqueeze(3).contiguous(), no_random_state((2,), q.device)]
            tensors = {"q": q_, "k": k_, "v": v_, "o": out_, "d_o": dout_}
            dq, dk, dv, *_ = bound.backward(
                aux_ctx_tensors=aux, **{name: x.contiguous() for name, x in tensors.items()}
            )
            return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
        call = self._call(q_, k_, v_, "sbhd", hi == 0)
        if self._wants_packing(call):
            packing = _single(call.queries, call.keys, hi == 0, q.device)
            dout_, q_, k_, v_, out_ = (x.flatten(1, 2) for x in (dout_, q_, k_, v_, out_))
            grads = self.backward_varlen(dout_, q_, k_, v_, out_, lse.flatten(0, 1), packing, scale)
            dq, dk, dv = (x.unflatten(1, (len(q), -1)).transpose(0, 1) for x in grads)
            return dq, dk, dv
        if min(call.queries, call.keys) < 2:
            return REFERENCE.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        if dense_backward_may_be_nan(call.keys, call.causal, q.device):
            return FLASH.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        ends = _even_ends(call, len(q), q.device)
        if (call.d, call.e) == (q.shape[-1], v.shape[-1]):
            self._bind(self._key(q_, k_, v_, hi, scale), call, ends, q.device)
        stats = lse.float()[..., None].contiguous()
        grads = self._gradients(call, (q_, k_, v_, out_, dout_), stats, ends, scale)
        dq, dk, dv = (x.transpose(0, 1) for x in grads)
        return dq, dk, dv

    def forward_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor]:
        call = self._call(q, k, v, "thd", packing.right == 0, packing)
        if self._backend(call) is None:
            return FLASH.forward_varlen(q, k, v, packing, scale)
        ends = _ends(call, packing.cu_q, packing.cu_k)
        out, stats = self._attend(call, q, k, v, ends, scale)
        return out[..., : v.shape[-1]], stats[..., 0].transpose(0, 1)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self._call(q, k, v, "thd", packing.right == 0, packing)
        if self._backend(call) is None:
            return FLASH.backward_varlen(dout, q, k, v, out, lse, packing, scale)
        stats = lse.float().transpose(0, 1)[..., None].contiguous()
        ends = _ends(call, packing.cu_q, packing.cu_k)
        return self._gradients(call, (q, k, v, out, dout), stats, ends, scale)

    def _attend(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, ends: _Ends, scale: float
    ) -> tuple[Tensor, Tensor]:
        tensors = {"q": pad(q, call.d), "k": pad(k, call.d), "v": pad(v, call.e)}
        forward = self._functions(call, scale, q.device).forward
        out, aux, *more = forward(**_contiguous(tensors), **ends)
        self._count(more)
        return out, aux[0]

    def _count(self, more: list[Tensor]) -> None:
        """Keep the largest logits [h] that a call returns beside out and lse, if it does."""
        if self.counts:
            # batch rows of a tile that goes as a packing are further heads
            found = more[0].float().unflatten(0, (-1, self._heads)).amax(0)
            seen = self.max_logit
            self.max_logit = found if seen is None else torch.maximum(seen, found)

    def _gradients(
        self, call: Call, tensors: tuple[Tensor, ...], stats: Tensor, ends: _Ends, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one call of TransformerEngine's backward. tensors: q, k, v, out
        and dout, in the layout of the call; stats: the lse as forward returns it, float32; ends:
        the cumulative lengths of queries and keys.
        """
        widths = call.d, call.d, call.e, call.e, call.e
        padded = dict(zip(_IN_BACKWARD, map(pad, tensors, widths), strict=True))
        backward = self._functions(call, scale, stats.device).backward
        assert backward is not None, "every call has a backward function"
        aux = [stats, no_random_state((2,), stats.device)]
        grads = backward(**_contiguous(padded), **ends, aux_ctx_tensors=aux)
        dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, tensors[:3], strict=False))
        return dq, dk, dv

    def _functions(self, call: Call, scale: float, device: torch.device) -> _Bound:
        """Return TransformerEngine's functions with all arguments of a call but the tensors, bound
        once.
        """
        key = call, scale, device, capturing(device)
        if key not in self._bound:
            backend, library = self._backend(call), te_library.loaded()
            if backend is None:
                raise KernelError(
                    f"kernel='transformer_engine': no fused backend for {call._asdict()}"
                )
            if len(self._bound) > _MAX_CALLS:
                self._bound.clear()
            values = {
                "max_seqlen_q": call.queries, "max_seqlen_kv": call.keys, "fake_dtype": call.dtype,
                "fused_attention_backend": backend, "attn_scale": scale, "dropout": 0.0,
                "qkv_layout": "_".join([call.layout] * 3),
                "dqkv_layout": "_".join([call.layout] * 3),
                "o_format": call.layout,
                "do_format": call.layout, "attn_bias_type": "no_bias", "attn_mask_type": call.mask,
                "softmax_type":
                "vanilla",
                "window_size": call.window, "bottom_right_diagonal": False,
            }  # fmt: skip
            forward = values | {
                "is_training": True,
                "return_max_logit": call.max_logit,
                "rng_gen": _generator(*key[2:]),
            }
            backward = values | {
                "dqkv_dtype": library.dtypes[call.dtype],
                "deterministic": call.deterministic,
            }
            self._bound[key] = _Bound(
                te_library.partial_of(library.forward, forward, _TENSORS),
                te_library.partial_of(library.backward, backward, (*_TENSORS, *_MORE_TENSORS)),
            )
        return self._bound[key]

    def _key(self, q: Tensor, k: Tensor, v: Tensor, hi: int, scale: float) -> tuple[Any, ...]:
        """Return everything that a dense call of tensors [s, b, h, d] depends on, except the
        tensors' values.
        """
        kind = q.dtype, q.device, hi == 0, deterministic(), capturing(q.device), self.counts
        return scale, q.shape, k.shape, v.shape, *kind

    def _bind(self, key: tuple[Any, ...], call: Call, ends: _Ends, device: torch.device) -> None:
        """Keep the functions with all arguments but the tensors for the next dense call of this
        key.
        """
        if len(self._dense) > _MAX_CALLS:
            self._dense.clear()
        forward, backward = self._functions(call, key[0], device)
        if backward is None or dense_backward_may_be_nan(call.keys, call.causal, device):
            backward = None
        else:
            backward = partial(backward, **ends)
        self._dense[key] = _Bound(partial(forward, **ends), backward)

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
        return Call(
            layout,
            causal,
            q.dtype,
            q.shape[-2],
            k.shape[-2],
            queries,
            keys,
            d,
            e,
            deterministic(),
            *more,
            max_logit=self.counts,
        )

    def _wants_packing(self, call: Call) -> bool:
        uneven = call.queries % _BLOCK or call.keys % _BLOCK
        return (
            bool(uneven)
            and self._backend(
                call._replace(layout="thd", tokens_q=call.queries, tokens_k=call.keys)
            )
            is not None
        )

    def _sizes(self, dtype: torch.dtype, d: int, e: int) -> tuple[int, int] | None:
        """Return the head sizes of the call: multiples of 8, or one size for both if two sizes have
        no backend; None if neither has one.
        """
        key = (dtype, d, e, deterministic())
        if key not in self._widths:
            self._widths[key] = self._find_sizes(dtype, d, e)
        return self._widths[key]

    def _has_packed(self, dtype: torch.dtype, d: int, e: int) -> bool:
        sizes = self._sizes(dtype, d, e) or (d, e)
        exact = deterministic()
        calls = (
            Call("thd", causal, dtype, 8, 8, 1024, 1024, *sizes, exact, 1, 1024, 1024)
            for causal in (False, True)
        )
        return all(self._backend(call) is not None for call in calls)

    def _find_sizes(self, dtype: torch.dtype, d: int, e: int) -> tuple[int, int] | None:
        d8, e8 = (-(-x // 8) * 8 for x in (d, e))
        for sizes in ((d8, e8), (max(d8, e8), max(d8, e8))):
            calls = (
                Call("sbhd", causal, dtype, 8, 8, 1024, 1024, *sizes, deterministic())
                for causal in (False, True)
            )
            if all(self._backend(call) is not None for call in calls):
                return sizes
        return None

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


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.contiguous() for name, x in tensors.items()}


_Ends = dict[str, Tensor | None]


def _even_ends(call: Call, count: int, device: torch.device) -> _Ends:
    """Return the ends of `count` sequences of a dense call."""
    return _ends(call, *(_even(size, count).on(device) for size in (call.queries, call.keys)))


def _ends(call: Call, cu_q: Tensor, cu_k: Tensor) -> _Ends:
    """Return the ends of sequences, or of packed tiles, which lie end to end."""
    padded_q, padded_k = (cu_q, cu_k) if call.layout == "thd" else (None, None)
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_k,
        "cu_seqlens_q_padded": padded_q,
        "cu_seqlens_kv_padded": padded_k,
    }


@RUNTIME.cache(maxsize=4096)
def _even(size: int, count: int) -> Copies:
    """Return the ends of `count` sequences of one size, int32 [count + 1]; made once."""
    return Copies(np.arange(0, (count + 1) * size, size, dtype=np.int32))


def _single(queries: int, keys: int, causal: bool, device: torch.device) -> Packing:
    """Return one tile as a packing; batch rows become heads."""
    of_q, of_k = (_even(size, 1).on(device) for size in (queries, keys))
    return Packing(of_q, of_k, queries, keys, -1, 0 if causal else -1)


KERNEL = RUNTIME.keep(TransformerEngineKernel())
