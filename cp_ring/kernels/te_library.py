"""The installed TransformerEngine: its functions, whether its version can be used, and the backend
that it names for a call.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

from cp_ring.errors import KernelError, one_line
from cp_ring.kernels.base import deterministic
from cp_ring.kernels.signatures import bind
from cp_ring.kernels.versions import cudnn_name
from cp_ring.runtime import RUNTIME

_OLDEST = "2.14"
_CUDNN_PACKED = 90600
"""The first cuDNN whose lse of packed tiles is not padded to the longest tile."""

_CUDNN_THD = 91800
"""The first cuDNN without a fault on Hopper that can make gradients of packed tiles NaN
(https://github.com/NVIDIA/TransformerEngine/issues/2186).
"""

_CUDNN_LOGITS = 92100
"""The first cuDNN for which TransformerEngine returns the largest logits."""

_CUDNN_EXACT = 92500
_CUDNN_WIDE = 92800
LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"
"""The environment variable that bounds a workspace of cuDNN. On Hopper, cuDNN's deterministic
backward wants batch * heads * queries * keys * 2 bytes, and for packed tiles the batch counts
tokens: 128 GiB for 8,192 tokens and 32 heads. With a number of bytes in this variable, newer
versions avoid workspaces above it and need 1 MiB
(https://github.com/NVIDIA/cudnn-frontend/pull/398).
"""

# Names of the values that calls pass: in both passes, in forward only, in backward only.
SHARED = (
    "q", "k", "v", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "fake_dtype", "fused_attention_backend", "attn_scale", "dropout",
    "qkv_layout",
    "dqkv_layout",
    "o_format", "do_format", "attn_bias_type", "attn_mask_type", "softmax_type", "window_size",
    "bottom_right_diagonal",
)  # fmt: skip
FORWARD = ("is_training", "return_max_logit", "rng_gen")
BACKWARD = ("o", "d_o", "aux_ctx_tensors", "dqkv_dtype", "deterministic")


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
def installed() -> Library | str:
    """Return TransformerEngine's functions, or in one line why they cannot be used."""
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
    version = importlib.import_module("transformer_engine").__version__
    if TorchVersion(version) < _OLDEST:
        return f"needs TransformerEngine {_OLDEST} or later, {version} is installed"
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
        version,
    )
    return _mismatch(library) or library


def _mismatch(library: Library) -> str | None:
    """Return why the parameters of the installed functions do not fit the adapter's calls; None if
    they do.
    """
    try:
        bind("transformer_engine", library.forward, dict.fromkeys((*SHARED, *FORWARD)))
        bind("transformer_engine", library.backward, dict.fromkeys((*SHARED, *BACKWARD)))
    except KernelError as error:
        return str(error).removeprefix("kernel='transformer_engine': ")
    return None


class Call(NamedTuple):
    """All facts about a call except its tensors; the cache key for TransformerEngine's choice of
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
    # tokens of all packed tiles together; 0 in a dense call
    tokens_q: int = 0
    tokens_k: int = 0
    max_logit: bool = False

    @property
    def qkv_layout(self) -> str:
        return "_".join([self.layout] * 3)

    @property
    def mask(self) -> str:
        dense, packed = ("causal", "padding_causal") if self.causal else ("no_mask", "padding")
        return packed if self.layout == "thd" else dense

    @property
    def window(self) -> tuple[int, int]:
        return (-1, 0) if self.causal else (-1, -1)


def max_logit_fault(library: Library) -> str | None:
    """Return why the library does not give the largest logits, or None."""
    if (library.cudnn or sys.maxsize) >= _CUDNN_LOGITS:
        return None
    return (
        f"gives the largest logits (--qk-clip) with cuDNN {cudnn_name(_CUDNN_LOGITS)} or later; "
        f"{cudnn_name(library.cudnn)} is installed"
    )


def packed_fault(library: Library, generation: int, d: int, e: int) -> str | None:
    """Return why packed tiles of these head sizes cannot run, or None. From 9.21 on cuDNN promises
    large heads on Blackwell; 9.24 then finds no plan for packed ones, and 9.28 does.
    """
    if generation < 10 or max(d, e) <= 192 or (library.cudnn or sys.maxsize) >= _CUDNN_WIDE:
        return None
    return (
        f"needs cuDNN {cudnn_name(_CUDNN_WIDE)} or later for packed heads of {d} on Blackwell; "
        f"{cudnn_name(library.cudnn)} is installed"
    )


def fault_of(library: Library, generation: int) -> str | None:
    """Return why these versions cannot be used on GPUs of this compute capability, or not for
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
        (cudnn < _CUDNN_PACKED, f"needs cuDNN {cudnn_name(_CUDNN_PACKED)} or later"),
        (hopper and cudnn < _CUDNN_THD,
         f"needs cuDNN {cudnn_name(_CUDNN_THD)} or later on Hopper, where gradients of packed "
         "tiles could be NaN before"),
        (exact and generation < 9, "has deterministic gradients only on Hopper and later"),
        (exact and hopper and cudnn < _CUDNN_EXACT,
         f"needs cuDNN {cudnn_name(_CUDNN_EXACT)} or later {huge}"),
        (exact and hopper and version < "2.18",
         f"needs TransformerEngine 2.18 or later {huge}"),
        (exact and hopper and not os.environ.get(LIMIT, "").isdecimal(),
         f"needs {LIMIT}=268435456 in the environment {huge}"),
    )
    # fmt: on
    return next((fault for holds, fault in faults if holds), None)


def loaded() -> Library:
    library = installed()
    if isinstance(library, str):
        raise KernelError(f"kernel='transformer_engine': transformer_engine {library}")
    return library


def ask(library: Library, call: Call) -> Any:
    """Return TransformerEngine's own value for the fused backend of a call."""
    dtype, enums = library.dtypes[call.dtype], library.enums
    layout, bias = enums.QKVLayout[call.qkv_layout], enums.AttnBiasType["no_bias"]
    mask, softmax = enums.AttnMaskType[call.mask], enums.SoftmaxType["vanilla"]
    if library.params is None:
        return library.extension.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, mask, softmax, 0.0,
            call.h, call.g, call.queries, call.keys, call.d, call.e,
            *call.window, call.max_logit, False, call.deterministic,
        )  # fmt: skip
    values = {
        "is_training": True, "deterministic": call.deterministic, "attn_mask_type": mask,
        "return_max_logit": call.max_logit,
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


def partial_of(
    function: Callable[..., Any], values: dict[str, Any], tensors: tuple[str, ...]
) -> Callable[..., Any]:
    """Bind all arguments of `function` but the named tensors, once."""
    bound = bind("transformer_engine", function, values | dict.fromkeys(tensors))
    return partial(
        function, **{name: value for name, value in bound.items() if name not in tensors}
    )
