"""flash-attn 4's kernels for the calls of plans, compiled for a GPU that is not there: the package
compiles them at their first call, and nothing is launched where the tensors are torch's fake ones.
"""

from __future__ import annotations

import importlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cp_ring.kernels import determinism
from cp_ring.kernels.base import OPEN, Packing
from cp_ring.kernels.flash import KERNEL, FlashKernel
from tests.fakegpu import te_build
from tests.fakegpu.accesses import mark

CUTLASS = "4.8.1"
PACKAGES = (
    "flash-attn-4==4.0.0b36", "quack-kernels==0.6.5", "apache-tvm-ffi==0.1.11",
    "torch-c-dlpack-ext==0.1.5", "einops", f"nvidia-cutlass-dsl=={CUTLASS}",
    *(f"nvidia-cutlass-dsl-libs-{part}=={CUTLASS}" for part in ("base", "core", "cu13")),
)  # fmt: skip
FUNCTIONS = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
CASES: dict[str, dict[str, Any]] = {
    "causal": {"size": 64, "hi": 0},
    "full, deterministic": {"size": 128, "exact": True},
    "window": {"size": 128, "lo": -200, "hi": 0},
    "packed": {"size": 64, "hi": 0, "documents": [300, 1, 723]},
    "packed window": {"size": 128, "lo": -200, "hi": 0, "documents": [300, 1, 723]},
}


def paths() -> list[Path]:
    """Folders for PYTHONPATH. Raises `Missing` where the packages cannot be had."""
    site = te_build.packages(f"flash-attn-4-cutlass-{CUTLASS}", *PACKAGES)
    return [site / "nvidia_cutlass_dsl" / "dsl_packages", site]


def compiled(cases: dict[str, dict[str, Any]], planted: bool = False) -> None:
    """The part "<case>: <functions>" for each case, those whose kernels were compiled; planted: the
    adapter rejects nothing.
    """
    interface: Any = importlib.import_module("flash_attn.cute.interface")
    if planted:
        FlashKernel.rejection = lambda *_: None  # type: ignore[method-assign]
    for name, case in cases.items():
        for function in FUNCTIONS:
            getattr(interface, function).compile_cache.clear()
        with FakeTensorMode(), determinism(case.get("exact", False)):
            _call(**case)
        done = [x for x in FUNCTIONS if getattr(interface, x).compile_cache.cache]
        mark(f"{name}: {', '.join(done)}")
    mark("end")


def _call(
    size: int,
    lo: int = -OPEN,
    hi: int = OPEN,
    documents: list[int] | None = None,
    exact: bool = False,
) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    assert (line := KERNEL.rejection(device, dtype, size, size)) is None, line
    q, k, v = (torch.empty(1, 1024, h, size, device=device, dtype=dtype) for h in (4, 2, 2))
    if documents is None:
        band: dict[str, Any] = {"lo": lo, "hi": hi, "scale": 0.1}
        out, lse = KERNEL.forward(q, k, v, **band)
        KERNEL.backward(out, q, k, v, out, lse, **band)
        return
    ends = torch.tensor([0, *accumulate(documents)], dtype=torch.int32, device=device)
    left = -1 if lo == -OPEN else -lo
    packing = Packing(ends, ends, max(documents), max(documents), left, hi)
    q, k, v = q[0], k[0], v[0]
    out, lse = KERNEL.forward_varlen(q, k, v, packing, 0.1)
    KERNEL.backward_varlen(out, q, k, v, out, lse, packing, 0.1)
