"""Attention kernels for one tile, and the choice among them."""

from __future__ import annotations

import importlib
import logging

import torch

from cp_ring.errors import KernelError
from cp_ring.kernels.base import AttentionKernel, Capabilities
from cp_ring.kernels.merge import merge_

__all__ = ["REGISTRY", "AttentionKernel", "Capabilities", "choose", "merge_"]

REGISTRY = {
    "flash_aten": "cp_ring.kernels.flash_aten",
    "cpu": "cp_ring.kernels.cpu",
    "reference": "cp_ring.kernels.reference",
}
"""Name to module, fastest first; a module is imported when it is first asked for and holds the kernel as KERNEL."""

_log = logging.getLogger(__name__)
_said: set[str] = set()


def choose(name: str, *, device: torch.device, dtype: torch.dtype, d: int, e: int) -> AttentionKernel:
    """The named kernel, or with "auto" the first of the registry that can serve such tensors.

    Raises `KernelError` when the name is unknown or the kernel cannot do the job; an explicit choice is never replaced.
    """
    if name != "auto" and name not in REGISTRY:
        raise KernelError(f"--cp-ring-kernel {name}: unknown; known are auto, {', '.join(REGISTRY)}")
    reasons = []
    for candidate in [name] if name != "auto" else REGISTRY:
        kernel: AttentionKernel = importlib.import_module(REGISTRY[candidate]).KERNEL
        reason = kernel.refusal(device, dtype, d, e)
        if reason is None:
            choice = f"attention kernel: {candidate} ({name}; {dtype} on {device.type}, head sizes {d} and {e})"
            if choice not in _said:
                _said.add(choice)
                _log.info(choice)
            return kernel
        reasons.append(f"{candidate} {reason}")
    raise KernelError(f"--cp-ring-kernel {name}: {'; '.join(reasons)}")
