"""The dtypes of running totals."""

from __future__ import annotations

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are summed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the running lse, where out is accumulated in `dtype`.

    It is float64 on the CPU. An error of lse is a relative error of all weights, and in float32 each merge rounds a number of
    about 8. No other sum of the ring loses as much accuracy, and lse is small compared with out. On CUDA it is `dtype`, which
    the Triton kernel reads.
    """
    return torch.float64 if device.type == "cpu" else dtype
