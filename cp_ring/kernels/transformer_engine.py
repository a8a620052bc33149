"""TransformerEngine's fused attention (cuDNN), tile by tile: float16 and bfloat16, full or causal, packed tiles, key and
value head sizes that may differ.

Its functions changed their parameters from version to version, so each call is bound by name to the parameters of the
installed version, and TransformerEngine is asked which backend supports a call.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_ring.errors import KernelError
from cp_ring.kernels.base import Packing, deterministic, no_random_state
from cp_ring.kernels.reference import KERNEL as SMALL
from cp_ring.kernels.signatures import bind
from cp_ring.kernels.window import pad
from cp_ring.plan.lower import Capabilities

_BLOCK = 128
"""Tiles whose sizes are not multiples of this use the varlen function: cuDNN builds a plan for each size of a dense call,
which takes long. The decision between single and packed calls (kernels/calls.py) is another one and comes before it."""


class Library(NamedTuple):
    """The parts of TransformerEngine that the adapter uses."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backends: Any
    enums: Any
    extension: Any
    dtypes: Any
    params: Any
    """The type of the one argument of the query for a backend, since 2.20; None where it takes many."""


@cache
def _library() -> Library | str:
    """TransformerEngine's functions, or in one line why they cannot be used."""
    try:
        # In this order: the package finds the extension and loads it.
        fused = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        extension = importlib.import_module("transformer_engine_torch")
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
        dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    except Exception as error:  # an installation without some of its parts raises whatever it likes
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("transformer_engine")
        return "needs TransformerEngine, which is not installed" if missing else f"cannot load TransformerEngine: {_line(error)}"
    if "return_max_logit" not in inspect.signature(fused.fused_attn_fwd).parameters:
        return "needs TransformerEngine 2.9 or later"
    return Library(
        fused.fused_attn_fwd,
        fused.fused_attn_bwd,
        fused.FusedAttnBackend,
        fused,
        extension,
        dtypes,
        getattr(utils, "FusedAttentionParams", None),
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class Call(NamedTuple):
    """Cache key for TransformerEngine's choice of backend: everything about a call except its tensors."""

    layout: str
    causal: bool
    dtype: torch.dtype
    h: int
    g: int
    queries: int
    keys: int
    d: int
    e: int
    deterministic: bool
    batch: int = 1
    # Of all packed tiles; 0 where nothing is packed.
    tokens_q: int = 0
    tokens_k: int = 0

    @property
    def mask(self) -> str:
        dense, packed = ("causal", "padding_causal") if self.causal else ("no_mask", "padding")
        return packed if self.layout == "thd" else dense

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0) if self.causal else (-1, -1)


class TransformerEngineKernel:
    """Follows `AttentionKernel` and `VarlenKernel`; out and gradients come in the input's dtype, lse in float32."""

    name = "transformer_engine"
    capabilities = Capabilities(varlen=True, deterministic=True)
    devices: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self._backends: dict[Call, Any] = {}
        # Statistics of packed tiles are [t, h, 1], before cuDNN 9.6 [tiles, h, max_q, 1]; forward tells.
        self._padded_stats = False

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type not in self.devices:
            return f"runs on CUDA, the tensors are on {device}"
        library = _library()
        if isinstance(library, str):
            return library
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        exact = " under deterministic algorithms" if deterministic() else ""
        return None if self._sizes(dtype, d, e) else f"has no fused backend for head sizes {d} and {e} in {dtype} here{exact}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = (x.transpose(0, 1) for x in (q, k, v))
        call = self._call(q_, k_, v_, "sbhd", hi == 0)
        if self._wants_packing(call):
            packing = _single(call.queries, call.keys, hi == 0, q.device)
            out, lse = self.forward_varlen(q_.flatten(1, 2), k_.flatten(1, 2), v_.flatten(1, 2), packing, scale)
            b, h = q.shape[0], q.shape[2]
            return out.unflatten(1, (b, h)).transpose(0, 1), lse.unflatten(0, (b, h))
        if min(call.queries, call.keys) < 2:
            return SMALL.forward(q, k, v, lo=lo, hi=hi, scale=scale)
        cu_q, cu_k = _even(call.queries, len(q), q.device), _even(call.keys, len(q), q.device)
        out, stats = self._attend(call, q_, k_, v_, cu_q, cu_k, scale)
        return out[..., : v.shape[-1]].transpose(0, 1), stats[..., 0]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout_, q_, k_, v_, out_ = (x.transpose(0, 1) for x in (dout, q, k, v, out))
        call = self._call(q_, k_, v_, "sbhd", hi == 0)
        if self._wants_packing(call):
            packing = _single(call.queries, call.keys, hi == 0, q.device)
            dout_, q_, k_, v_, out_ = (x.flatten(1, 2) for x in (dout_, q_, k_, v_, out_))
            grads = self.backward_varlen(dout_, q_, k_, v_, out_, lse.flatten(0, 1), packing, scale)
            dq, dk, dv = (x.unflatten(1, (len(q), -1)).transpose(0, 1) for x in grads)
            return dq, dk, dv
        if min(call.queries, call.keys) < 2:
            return SMALL.backward(dout, q, k, v, out, lse, lo=lo, hi=hi, scale=scale)
        cu_q, cu_k = _even(call.queries, len(q), q.device), _even(call.keys, len(q), q.device)
        stats = lse.float()[..., None].contiguous()
        grads = self._gradients(call, dout_, q_, k_, v_, out_, stats, cu_q, cu_k, scale)
        dq, dk, dv = (x.transpose(0, 1) for x in grads)
        return dq, dk, dv

    def forward_varlen(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        call = self._call(q, k, v, "thd", packing.right == 0, packing)
        out, stats = self._attend(call, q, k, v, packing.cu_q, packing.cu_k, scale)
        self._padded_stats = stats.dim() == 4
        if self._padded_stats:
            tile, position = _places(packing, len(q))
            stats = stats[tile, :, position]
        return out[..., : v.shape[-1]], stats[..., 0].transpose(0, 1)

    def backward_varlen(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self._call(q, k, v, "thd", packing.right == 0, packing)
        stats = lse.float().transpose(0, 1)[..., None].contiguous()
        if self._padded_stats:
            tile, position = _places(packing, len(q))
            padded = stats.new_zeros((call.batch, stats.shape[1], call.queries, 1))
            padded[tile, :, position] = stats
            stats = padded
        return self._gradients(call, dout, q, k, v, out, stats, packing.cu_q, packing.cu_k, scale)

    def _attend(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        library = _loaded()
        tensors = {"q": pad(q, call.d), "k": pad(k, call.d), "v": pad(v, call.e)}
        values = self._values(call, tensors, cu_q, cu_k, scale) | {"is_training": True, "return_max_logit": False}
        out, aux, *_ = library.forward(**bind("transformer_engine", library.forward, values))
        return out, aux[0]

    def _gradients(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
        cu_q: Tensor, cu_k: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        library = _loaded()
        tensors = {"q": pad(q, call.d), "k": pad(k, call.d), "v": pad(v, call.e), "o": pad(out, call.e), "d_o": pad(dout, call.e)}
        aux = [stats, no_random_state((2,), q.device)]
        values = self._values(call, tensors, cu_q, cu_k, scale) | {
            "aux_ctx_tensors": aux, "dqkv_dtype": library.dtypes[q.dtype], "deterministic": call.deterministic,
        }  # fmt: skip
        dq, dk, dv, *_ = library.backward(**bind("transformer_engine", library.backward, values))
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

    def _values(self, call: Call, tensors: dict[str, Tensor], cu_q: Tensor, cu_k: Tensor, scale: float) -> dict[str, Any]:
        backend = self._backend(call)
        if backend is None:
            raise KernelError(f"kernel='transformer_engine': no fused backend for {call._asdict()}")
        packed = call.layout == "thd"
        return {name: x.contiguous() for name, x in tensors.items()} | {
            "max_seqlen_q": call.queries, "max_seqlen_kv": call.keys, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k,
            "cu_seqlens_q_padded": cu_q if packed else None, "cu_seqlens_kv_padded": cu_k if packed else None,
            "fake_dtype": call.dtype, "fused_attention_backend": backend, "attn_scale": scale, "dropout": 0.0,
            "qkv_layout": "_".join([call.layout] * 3), "dqkv_layout": "_".join([call.layout] * 3), "o_format": call.layout,
            "do_format": call.layout, "attn_bias_type": "no_bias", "attn_mask_type": call.mask, "softmax_type": "vanilla",
            "window_size": call.window, "bottom_right_diagonal": False,
        }  # fmt: skip

    def _call(self, q: Tensor, k: Tensor, v: Tensor, layout: str, causal: bool, packing: Packing | None = None) -> Call:
        """Of tensors [s, b, h, d], or packed [t, h, d]."""
        d, e = self._sizes(q.dtype, q.shape[-1], v.shape[-1]) or (q.shape[-1], v.shape[-1])
        if packing:
            # The largest sizes may be rounded up; that leaves fewer kinds of calls.
            queries, keys = (-(-x // _BLOCK) * _BLOCK for x in (packing.max_q, packing.max_k))
            more = len(packing.cu_q) - 1, len(q), len(k)
        else:
            queries, keys, more = len(q), len(k), (q.shape[1], 0, 0)
        return Call(layout, causal, q.dtype, q.shape[-2], k.shape[-2], queries, keys, d, e, deterministic(), *more)

    def _wants_packing(self, call: Call) -> bool:
        uneven = call.queries % _BLOCK or call.keys % _BLOCK
        return bool(uneven) and self._backend(call._replace(layout="thd", tokens_q=call.queries, tokens_k=call.keys)) is not None

    def _sizes(self, dtype: torch.dtype, d: int, e: int) -> tuple[int, int] | None:
        """Head sizes of the call: multiples of 8, and one size for both where two have no backend."""
        d8, e8 = (-(-x // 8) * 8 for x in (d, e))
        for sizes in ((d8, e8), (max(d8, e8), max(d8, e8))):
            calls = (Call("sbhd", causal, dtype, 8, 8, 1024, 1024, *sizes, deterministic()) for causal in (False, True))
            if all(self._backend(call) is not None for call in calls):
                return sizes
        return None

    def _backend(self, call: Call) -> Any:
        """The fused backend that TransformerEngine names for the call, or None."""
        if call not in self._backends:
            if len(self._backends) > 4096:  # packed documents bring ever new sizes
                self._backends.clear()
            backend = _ask(_loaded(), call)
            self._backends[call] = None if int(backend) == int(_loaded().backends["No_Backend"]) else backend
        return self._backends[call]


def _loaded() -> Library:
    library = _library()
    if isinstance(library, str):
        raise KernelError(f"kernel='transformer_engine': transformer_engine {library}")
    return library


def _ask(library: Library, call: Call) -> Any:
    """TransformerEngine's own value for the fused backend of a call."""
    dtype, enums = library.dtypes[call.dtype], library.enums
    layout, bias = enums.QKVLayout["_".join([call.layout] * 3)], enums.AttnBiasType["no_bias"]
    mask, softmax = enums.AttnMaskType[call.mask], enums.SoftmaxType["vanilla"]
    if library.params is None:
        # By position; the list grew together with the parameters of the forward function.
        names = inspect.signature(library.forward).parameters
        extra = [x for name, x in (("cuda_graph", False), ("bottom_right_diagonal", call.deterministic)) if name in names]
        return library.extension.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, mask, softmax, 0.0, call.h, call.g, call.queries, call.keys, call.d, call.e,
            *call.window, False, *extra,
        )  # fmt: skip
    values = {
        "is_training": True, "deterministic": call.deterministic, "attn_mask_type": mask, "bias_type": bias,
        "window_size_left": call.window[0], "window_size_right": call.window[1], "bottom_right_diagonal": False,
        "softmax_type": softmax, "dropout": 0.0, "attn_scale": call.d**-0.5, "qkv_dtype": dtype, "o_dtype": dtype,
        "do_dtype": dtype, "dqkv_dtype": dtype, "qkv_layout": layout, "dqkv_layout": layout,
        "o_format": enums.QKVFormat[call.layout], "do_format": enums.QKVFormat[call.layout], "batch_size": call.batch,
        "num_attn_heads": call.h, "num_gqa_groups": call.g, "head_dim_qk": call.d, "head_dim_v": call.e,
        "max_seqlen_q": call.queries, "max_seqlen_kv": call.keys, "num_tokens_q": call.tokens_q, "num_tokens_kv": call.tokens_k,
    }  # fmt: skip
    backend, _ = library.extension.get_fused_attn_backend(library.params(**bind("transformer_engine", library.params, values)))
    return backend


@lru_cache(maxsize=4096)
def _even(size: int, count: int, device: torch.device) -> Tensor:
    """Ends of `count` sequences of one size, int32 [count + 1]."""
    return torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device)


def _single(queries: int, keys: int, causal: bool, device: torch.device) -> Packing:
    """One tile as a packing; the batch joins the heads."""
    return Packing(_even(queries, 1, device), _even(keys, 1, device), queries, keys, -1, 0 if causal else -1)


def _places(packing: Packing, total: int) -> tuple[Tensor, Tensor]:
    """The tile of each packed query, and its position within the tile, int64 [total]."""
    position = torch.arange(total, device=packing.cu_q.device)
    tile = torch.searchsorted(packing.cu_q[1:].long(), position, right=True)
    return tile, position - packing.cu_q[tile]


KERNEL = TransformerEngineKernel()
