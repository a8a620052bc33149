"""The adapter of flash-attn: version 4 (flash_attn.cute) or 3 (flash_attn_interface), the newest
that is installed. Version 2's kernels come with PyTorch (`cp_ring.kernels.flash_aten`).

The parameters of their inner functions differ between versions, so values are bound by name to the
parameters of the installed version.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_ring.errors import KernelError, one_line
from cp_ring.kernels.base import Gradients, OutLse, Packing, deterministic
from cp_ring.kernels.signatures import bind, name_of, parameters_of
from cp_ring.kernels.versions import compute_capability
from cp_ring.kernels.window import Window, WindowKernel
from cp_ring.runtime import RUNTIME

_HOMES = (
    ("4", "flash_attn.cute.interface", ("_flash_attn_fwd", "_flash_attn_bwd")),
    ("3", "flash_attn_interface", ("_flash_attn_forward", "_flash_attn_backward")),
)
_GENERATIONS = {"4": range(9, 13), "3": range(8, 10)}
"""Major compute capabilities for which a version has kernels."""
_NOT_EXACT_IN_4 = 12
_FORWARD = ("q", "k", "v", "return_lse")
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "lse", "deterministic", "dq", "dk", "dv")
# Values for parameters without a default: attention without caches, rotation and quantization.
_ABSENT: dict[str, Any] = {"softcap": 0.0}
_ABSENT |= dict.fromkeys(
    (
        "k_new",
        "v_new",
        "qv",
        "out",
        "out_",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "seqused_q",
        "seqused_k",
        "sequed_q",
        "sequed_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "q_descale",
        "k_descale",
        "v_descale",
    )
)


@dataclass(frozen=True)
class Functions:
    """The inner functions of one installed flash-attn."""

    version: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]


def arguments(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `values` that `function` has parameters for. Open sides of a window are
    written as its version wants them.

    Raises `KernelError` if the function needs a value that is unknown here, or has no parameter for
    one that attention depends on.
    """
    bound = bind("flash", function, values, _ABSENT)
    for wanted in (
        {"softmax_scale"},
        {"causal", "is_causal"},
        {"window_size", "window_size_left"},
        {"cu_seqlens_q"},
    ):
        if wanted & values.keys() and not wanted & bound.keys():
            raise KernelError(
                f"kernel='flash': {name_of(function)} of the installed version has no "
                f"{' or '.join(sorted(wanted))}"
            )
    # Version 4 writes None for an open side, version 3 -1.
    for side in ("window_size_left", "window_size_right"):
        if bound.get(side) == -1 and parameters_of(function)[side].default is None:
            bound[side] = None
    return bound


@RUNTIME.cache(maxsize=8)
def _mismatch(functions: Functions) -> str | None:
    """Return why the parameters of the installed functions do not fit the adapter's calls; None if
    they do.
    """
    packing = Packing(torch.empty(0), torch.empty(0), 0, 0)
    try:
        for packed in (None, packing):
            options = _options(Window(-1, -1, packed, 1.0))
            arguments(functions.forward, dict.fromkeys(_FORWARD) | options)
            arguments(functions.backward, dict.fromkeys(_BACKWARD) | options)
    except KernelError as error:
        return str(error).removeprefix("kernel='flash': ")
    return None


@RUNTIME.cache()
def _installed() -> Functions | str:
    """Return the newest version that is installed and runs on this GPU, or in one line why there is
    none.
    """
    reasons = []
    for version, home, names in _HOMES:
        try:
            module = importlib.import_module(home)
            functions = Functions(version, *(getattr(module, name) for name in names))
        except ModuleNotFoundError as error:
            # another package is missing
            if not error.name or not f"{home}.".startswith(f"{error.name}."):
                reasons.append(
                    f"cannot load flash-attn {version}: it needs {error.name}, which is not "
                    "installed"
                )
        except Exception as error:  # an incomplete installation can raise any exception
            reasons.append(f"cannot load flash-attn {version}: {one_line(error)[:200]}")
        else:
            if _generation() in _GENERATIONS[version]:
                return functions
            reasons.append(
                f"{version} has no backward for GPUs of compute capability {_generation()}"
            )
    return "; ".join(reasons) or "needs flash-attn 3 or 4, which is not installed"


def _generation() -> int:
    return compute_capability(torch.device("cuda"))[0]


class FlashKernel(WindowKernel):
    """An `AttentionKernel` and `VarlenKernel`; out and gradients have the input's dtype, lse has
    float32.
    """

    name = "flash"
    devices: tuple[str, ...] = ("cuda",)

    @property
    def functions(self) -> Functions | str:
        """The functions of the installed flash-attn, or why it cannot be used."""
        return _installed()

    def rejection(self, device: torch.device, dtype: torch.dtype, d: int, e: int) -> str | None:
        if device.type not in self.devices:
            return f"runs on CUDA, the tensors are on {device}"
        if isinstance(self.functions, str):
            return self.functions
        if dtype not in (torch.float16, torch.bfloat16):
            return f"supports float16 and bfloat16, not {dtype}"
        if deterministic() and "deterministic" not in parameters_of(self.functions.backward):
            return f"{self.functions.version} as installed has no deterministic backward"
        if deterministic() and self.functions.version == "4" and _generation() == _NOT_EXACT_IN_4:
            return (
                "flash-attn 4 has no deterministic backward for GPUs of compute capability "
                f"{_NOT_EXACT_IN_4}"
            )
        mismatch = _mismatch(self.functions)
        if mismatch:
            return mismatch
        limit = {"4": 128, "3": 256}[self.functions.version]
        if max(d, e) <= limit or (self.functions.version == "4" and (d, e) == (192, 128)):
            return None
        return f"{self.functions.version} supports head sizes up to {limit}, not {d} and {e}"

    def head_sizes(self, d: int, e: int) -> tuple[int, int]:
        assert isinstance(self.functions, Functions)
        return (
            (d, e)
            if self.functions.version == "4" and (d, e) == (192, 128)
            else super().head_sizes(d, e)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: Window) -> OutLse:
        assert isinstance(self.functions, Functions)
        function = self.functions.forward
        values = dict(zip(_FORWARD, (q, k, v, True), strict=True))
        out, lse, *_ = function(**arguments(function, values | _options(window)))
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
        assert isinstance(self.functions, Functions)
        function = self.functions.backward
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        values = dict(
            zip(_BACKWARD, (dout, q, k, v, out, lse, lse, deterministic(), dq, dk, dv), strict=True)
        )
        function(**arguments(function, values | _options(window)))
        return dq, dk, dv


def _options(window: Window) -> dict[str, Any]:
    left, right, packing, scale = window
    causal = (left, right) == (-1, 0)
    right = -1 if causal else right
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "is_causal": causal,
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
    }
    if packing:
        options |= {"cu_seqlens_q": packing.cu_q, "cu_seqlens_k": packing.cu_k}
        options |= {"max_seqlen_q": packing.max_q, "max_seqlen_k": packing.max_k}
    return options


KERNEL = FlashKernel()
