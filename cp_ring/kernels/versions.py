"""The GPU's generation and the version of cuDNN, on which known faults of kernels depend."""

from __future__ import annotations

import torch


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of the GPU; without a GPU that of Hopper, (9, 0)."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


def on_hopper(device: torch.device) -> bool:
    """Return True if `device` is a GPU of compute capability 9.x, or if there is no GPU."""
    return compute_capability(device)[0] == 9


def cudnn_name(version: int) -> str:
    """Return the usual spelling of cuDNN's version number: 91900 is 9.19.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def dense_backward_may_be_nan(keys: int, causal: bool, device: torch.device) -> bool:
    """Return True if dq of cuDNN's dense backward may be NaN.

    cuDNN's kernel on Hopper works on blocks of 128 keys. If `keys` is 64 modulo 128, it scores the
    64 missing keys of the last block with 0, and exp(0 - lse) overflows for queries with an lse
    below -88.7. The causal mask hides these keys. Source:
    https://github.com/pytorch/pytorch/issues/196678.
    """
    return keys % 128 == 64 and not causal and on_hopper(device)
