"""TransformerEngine's fused attention (cuDNN) for tiles: float16 and bfloat16, full or causal,
single or packed. Head sizes of keys and values may differ.

Its functions have other parameters in every version, so values are bound by name to the parameters
of the installed version. TransformerEngine itself says which backend supports a call.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from cp_ring.errors import KernelError, one_line
from cp_ring.kernels.base import Packing, deterministic, no_random_state
from cp_ring.kernels.flash_aten import KERNEL as FLASH
from cp_ring.kernels.reference import KERNEL as REFERENCE
from cp_ring.kernels.signatures import bind, parameters_of
from cp_ring.kernels.versions import compute_capability, cudnn_name, dense_backward_may_be_nan
from cp_ring.kernels.window import pad
from cp_ring.ops.capture import capturing
from cp_ring.plan.lower import KERNELS
from cp_ring.runtime import RUNTIME

_BLOCK = 128
"""Tiles whose sizes are not multiples of this go to the function for packed tiles, as a packing of
one tile. cuDNN builds a plan for every size of a dense call, which takes long. kernels/calls.py
packs such tiles already, in calls of few sizes."""

_CUDNN_THD = 91800
"""On Hopper, gradients of packed tiles can be NaN in older versions of cuDNN
(https://github.com/NVIDIA/TransformerEngine/issues/2186)."""

_CUDNN_EXACT = 92500
_LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"
"""On Hopper, cuDNN's deterministic backward wants a workspace of batch * heads * queries * keys * 2
bytes, and for packed tiles the batch counts tokens: 128 GiB for 8,192 tokens and 32 heads. These
versions need 1 MiB where this variable of the environment is a number, from which bytes on they
must (https://github.com/NVIDIA/cudnn-frontend/pull/398)."""


# Names of the values that calls pass: in both passes, in forward only, in backward only.
_SHARED = (
    "q", "k", "v", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "fake_dtype", "fused_attention_backend", "attn_scale", "dropout",
    "qkv_layout",
    "dqkv_layout",
    "o_format", "do_format", "attn_bias_type", "attn_mask_type", "softmax_type", "window_size",
    "bottom_right_diagonal",
)  # fmt: skip
_FORWARD = ("is_training", "return_max_logit", "rng_gen")
_BACKWARD = ("o", "d_o", "aux_ctx_tensors", "dqkv_dtype", "deterministic")

# Of these, what is new in every call.
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
"""Kinds of calls that are remembered: packed documents keep bringing new ones."""


class Library(NamedTuple):
    """The parts of TransformerEngine that the adapter uses."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backends: Any
    enums: Any
    extension: Any
    dtypes: Any
    params: Any
    """The type of the only argument of `get_fused_attn_backend`, since 2.20; None if it takes many
    arguments.
    """
    cudnn: int
    """cuDNN's version, 92500 for 9.25.0."""
    version: str


@RUNTIME.cache()
def _library() -> Library | str:
    """TransformerEngine's functions, or why they cannot be used, in one line."""
    try:
        # The package comes first, because it loads the extension.
        fused = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        extension = importlib.import_module("transformer_engine_torch")
        utils = importlib.import_module(
            "transformer_engine.pytorch.attention.dot_product_attention.utils"
        )
        dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    except Exception as error:  # an incomplete installation can raise any exception
        missing = isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine"
        return (
            "needs TransformerEngine, which is not installed"
            if missing
            else f"cannot load TransformerEngine: {one_line(error)[:200]}"
        )
    if "return_max_logit" not in parameters_of(fused.fused_attn_fwd):
        return "needs TransformerEngine 2.9 or later"
    cudnn = getattr(extension, "get_cudnn_version", torch.backends.cudnn.version)
    library = Library(
        fused.fused_attn_fwd,
        fused.fused_attn_bwd,
        fused.FusedAttnBackend,
        fused,
        extension,
        dtypes,
        getattr(utils, "FusedAttentionParams", None),
        cudnn() or 0,
        importlib.import_module("transformer_engine").__version__,
    )
    return _mismatch(library) or library


def _mismatch(library: Library) -> str | None:
    """Why the parameters of the installed functions do not fit the adapter's calls; None if they
    do.
    """
    try:
        bind("transformer_engine", library.forward, dict.fromkeys((*_SHARED, *_FORWARD)))
        bind("transformer_engine", library.backward, dict.fromkeys((*_SHARED, *_BACKWARD)))
    except KernelError as error:
        return str(error).removeprefix("kernel='transformer_engine': ")
    return None


class Call(NamedTuple):
    """Everything about a call except its tensors; the cache key for TransformerEngine's choice of
    backend.
    """

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
    # Of all packed tiles together; 0 in a dense call.
    tokens_q: int = 0
    tokens_k: int = 0

    @property
    def mask(self) -> str:
        dense, packed = ("causal", "padding_causal") if self.causal else ("no_mask", "padding")
        return packed if self.layout == "thd" else dense

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0) if self.causal else (-1, -1)


class _Bound(NamedTuple):
    """TransformerEngine's functions with all arguments but the tensors; those of `_dense` have the
    ends of sequences too.

    `backward` is None if another kernel computes it.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


class TransformerEngineKernel:
    """Follows `AttentionKernel` and `VarlenKernel`; out and gradients have the input's dtype, lse
    has float32.
    """

    name = "transformer_engine"
    capabilities = KERNELS["transformer_engine"]
    devices: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self._backends: dict[Call, Any] = {}
        self._bound: dict[tuple[Call, float, torch.device, bool], _Bound] = {}
        self._dense: dict[tuple[object, ...], _Bound] = {}
        self._widths: dict[tuple[torch.dtype, int, int, bool], tuple[int, int] | None] = {}
        # The lse of packed tiles is [t, h, 1], and [tiles, h, max_q, 1] before cuDNN 9.6.
        # `forward_varlen` finds out.
        self._padded_lse = False

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type not in self.devices:
            return f"runs on CUDA, the tensors are on {device}"
        library = _library()
        if isinstance(library, str):
            return library
        if dtype not in (torch.float16, torch.bfloat16):
            return f"knows float16 and bfloat16, not {dtype}"
        fault = _fault(library, compute_capability(device)[0])
        if fault:
            return f"{fault}; {library.version} and cuDNN {cudnn_name(library.cudnn)} are installed"
        exact = " under deterministic algorithms" if deterministic() else ""
        return (
            None
            if self._sizes(dtype, d, e)
            else f"has no fused backend for head sizes {d} and {e} in {dtype} here{exact}"
        )

    def varlen_rejection(self, dtype: torch.dtype, d: int, e: int) -> str | None:
        """Follows `LimitedVarlen`: before Hopper, cuDNN has no packed tiles."""
        return (
            None
            if self._has_packed(dtype, d, e)
            else f"has no fused backend for packed tiles in {dtype} here"
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, lo: int, hi: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        bound = self._dense.get(self._key(q_, k_, v_, hi, scale))
        if bound is not None:
            out, aux, *_ = bound.forward(q=q_.contiguous(), k=k_.contiguous(), v=v_.contiguous())
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
        self._padded_lse = stats.dim() == 4
        if self._padded_lse:
            tile, position = packing.places
            stats = stats[tile, :, position]
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
        if self._padded_lse:
            tile, position = packing.places
            padded = stats.new_zeros((call.batch, stats.shape[1], call.queries, 1))
            padded[tile, :, position] = stats[: len(tile)]
            stats = padded
        ends = _ends(call, packing.cu_q, packing.cu_k)
        return self._gradients(call, (q, k, v, out, dout), stats, ends, scale)

    def _attend(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, ends: _Ends, scale: float
    ) -> tuple[Tensor, Tensor]:
        tensors = {"q": pad(q, call.d), "k": pad(k, call.d), "v": pad(v, call.e)}
        forward = self._functions(call, scale, q.device).forward
        out, aux, *_ = forward(**_contiguous(tensors), **ends)
        return out, aux[0]

    def _gradients(
        self, call: Call, tensors: tuple[Tensor, ...], stats: Tensor, ends: _Ends, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv. tensors: q, k, v, out and dout."""
        widths = call.d, call.d, call.e, call.e, call.e
        padded = dict(zip(_IN_BACKWARD, map(pad, tensors, widths), strict=True))
        backward = self._functions(call, scale, stats.device).backward
        assert backward is not None, "every call has a backward function"
        aux = [stats, no_random_state((2,), stats.device)]
        grads = backward(**_contiguous(padded), **ends, aux_ctx_tensors=aux)
        dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, tensors[:3], strict=False))
        return dq, dk, dv

    def _functions(self, call: Call, scale: float, device: torch.device) -> _Bound:
        """TransformerEngine's functions with all arguments of a call but the tensors, worked out
        once.
        """
        key = call, scale, device, capturing(device)
        if key not in self._bound:
            backend, library = self._backend(call), _loaded()
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
                "return_max_logit": False,
                "rng_gen": _generator(*key[2:]),
            }
            backward = values | {
                "dqkv_dtype": library.dtypes[call.dtype],
                "deterministic": call.deterministic,
            }
            self._bound[key] = _Bound(
                _partial(library.forward, forward, _TENSORS),
                _partial(library.backward, backward, (*_TENSORS, *_MORE_TENSORS)),
            )
        return self._bound[key]

    def _key(self, q: Tensor, k: Tensor, v: Tensor, hi: int, scale: float) -> tuple[Any, ...]:
        """All that a dense call of tensors [s, b, h, d] depends on, except the values of the
        tensors.
        """
        kind = q.dtype, q.device, hi == 0, deterministic(), capturing(q.device)
        return scale, q.shape, k.shape, v.shape, *kind

    def _bind(self, key: tuple[Any, ...], call: Call, ends: _Ends, device: torch.device) -> None:
        """Keeps the functions with all arguments but the tensors, for the next dense call of this
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
        """The call for tensors [s, b, h, d], or with a packing [t, h, d]."""
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
        """Head sizes of the call: multiples of 8, or one size for both if two sizes have no
        backend; None if neither has one.
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
        """The fused backend that TransformerEngine names for the call; None if there is none."""
        if call not in self._backends:
            if len(self._backends) > _MAX_CALLS:
                self._backends.clear()
            backend = _ask(_loaded(), call)
            self._backends[call] = (
                None if int(backend) == int(_loaded().backends["No_Backend"]) else backend
            )
        return self._backends[call]


def _fault(library: Library, generation: int) -> str | None:
    """Why these versions cannot be used on GPUs of this compute capability, or not for
    deterministic gradients; 0 is an unknown version of cuDNN.
    """
    cudnn, version = library.cudnn or sys.maxsize, TorchVersion(library.version)
    hopper, exact = generation == 9, deterministic()
    huge = (
        "for deterministic gradients on Hopper, whose workspace is 128 GiB for 8,192 packed tokens "
        "of 32 heads without"
    )
    # fmt: off
    faults = (
        (hopper and cudnn < _CUDNN_THD,
         f"needs cuDNN {cudnn_name(_CUDNN_THD)} or later on Hopper, where gradients of packed "
         "tiles could be NaN before"),
        (exact and generation < 9, "has deterministic gradients on Hopper and later"),
        (exact and generation > 9 and version < "2.12",
         "needs TransformerEngine 2.12 or later for deterministic gradients on Blackwell"),
        (exact and hopper and cudnn < _CUDNN_EXACT,
         f"needs cuDNN {cudnn_name(_CUDNN_EXACT)} or later {huge}"),
        (exact and hopper and version < "2.18",
         f"needs TransformerEngine 2.18 or later {huge}"),
        (exact and hopper and not os.environ.get(_LIMIT, "").isdecimal(),
         f"needs {_LIMIT}=268435456 in the environment {huge}"),
    )
    # fmt: on
    return next((fault for holds, fault in faults if holds), None)


@RUNTIME.cache(maxsize=16)
def _generator(device: torch.device, in_graph: bool) -> torch.Generator | None:
    """A generator of its own for TransformerEngine, which advances one in every forward call even
    if dropout is 0.

    The default generator would then give other numbers to hidden dropout when a recomputation skips
    attention. A CUDA graph takes only generators that were registered with it, of which None, the
    default one, is the only one known here.
    """
    return None if in_graph else torch.Generator(device)


def _loaded() -> Library:
    library = _library()
    if isinstance(library, str):
        raise KernelError(f"kernel='transformer_engine': transformer_engine {library}")
    return library


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.contiguous() for name, x in tensors.items()}


_Ends = dict[str, Tensor | None]


def _even_ends(call: Call, count: int, device: torch.device) -> _Ends:
    """Those of `count` sequences of a dense call."""
    return _ends(call, _even(call.queries, count, device), _even(call.keys, count, device))


def _ends(call: Call, cu_q: Tensor, cu_k: Tensor) -> _Ends:
    """The ends of sequences, or of packed tiles, which lie end to end."""
    padded_q, padded_k = (cu_q, cu_k) if call.layout == "thd" else (None, None)
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_k,
        "cu_seqlens_q_padded": padded_q,
        "cu_seqlens_kv_padded": padded_k,
    }


def _partial(
    function: Callable[..., Any], values: dict[str, Any], tensors: tuple[str, ...]
) -> Callable[..., Any]:
    """`function` with all arguments but the named tensors, worked out once."""
    bound = bind("transformer_engine", function, values | dict.fromkeys(tensors))
    return partial(
        function, **{name: value for name, value in bound.items() if name not in tensors}
    )


def _ask(library: Library, call: Call) -> Any:
    """TransformerEngine's own value for the fused backend of a call."""
    dtype, enums = library.dtypes[call.dtype], library.enums
    layout, bias = enums.QKVLayout["_".join([call.layout] * 3)], enums.AttnBiasType["no_bias"]
    mask, softmax = enums.AttnMaskType[call.mask], enums.SoftmaxType["vanilla"]
    if library.params is None:
        # By position: the list grew together with the parameters of the forward function.
        names = parameters_of(library.forward)
        extra = [
            x
            for name, x in (("cuda_graph", False), ("bottom_right_diagonal", call.deterministic))
            if name in names
        ]
        return library.extension.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, mask, softmax, 0.0,
            call.h, call.g, call.queries, call.keys, call.d, call.e,
            *call.window, False, *extra,
        )  # fmt: skip
    values = {
        "is_training": True, "deterministic": call.deterministic, "attn_mask_type": mask,
        "bias_type": bias,
        "window_size_left": call.window[0], "window_size_right": call.window[1],
        "bottom_right_diagonal": False,
        "softmax_type": softmax, "dropout": 0.0, "attn_scale": call.d**-0.5, "qkv_dtype": dtype,
        "o_dtype": dtype,
        "do_dtype": dtype, "dqkv_dtype": dtype, "qkv_layout": layout, "dqkv_layout": layout,
        "o_format": enums.QKVFormat[call.layout], "do_format": enums.QKVFormat[call.layout],
        "batch_size": call.batch,
        "num_attn_heads": call.h, "num_gqa_groups": call.g,
        "head_dim_qk": call.d, "head_dim_v": call.e,
        "max_seqlen_q": call.queries, "max_seqlen_kv": call.keys, "num_tokens_q": call.tokens_q,
        "num_tokens_kv": call.tokens_k,
    }  # fmt: skip
    backend, _ = library.extension.get_fused_attn_backend(
        library.params(**bind("transformer_engine", library.params, values))
    )
    return backend


@RUNTIME.cache(maxsize=4096)
def _even(size: int, count: int, device: torch.device) -> Tensor:
    """The ends of `count` sequences of one size, int32 [count + 1]; made once."""
    return torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device)


@RUNTIME.cache(maxsize=4096)
def _single(queries: int, keys: int, causal: bool, device: torch.device) -> Packing:
    """One tile as a packing; batch rows become heads."""
    return Packing(
        _even(queries, 1, device), _even(keys, 1, device), queries, keys, -1, 0 if causal else -1
    )


KERNEL = TransformerEngineKernel()
