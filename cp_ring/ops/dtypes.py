"""The dtypes of inputs and of running totals, and the contexts in which operations on them run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations on `device` compute in the dtypes of their inputs,
    whatever `torch.autocast` is around it.
    """
    return (
        torch.autocast(device.type, enabled=False)
        if torch.is_autocast_enabled(device.type)
        else _NOTHING
    )


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the device of x is the current one."""
    return torch.cuda.device_of(x) if x.is_cuda else _NOTHING


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors of different dtypes to that of `torch.autocast`, if it is in force; else return
    them as they are.

    Like torch's own autocast, it leaves float64 alone.
    """
    dtypes, device = {x.dtype for x in tensors}, tensors[0].device
    if len(dtypes) == 1 or not torch.is_autocast_enabled(device.type):
        return tensors
    if torch.float64 in dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device.type)) for x in tensors)


def waited(x: Tensor) -> Tensor:
    """Return x, and where it is the result of one of torch's functional collectives that may still
    run (an `AsyncCollectiveTensor`, as of `RowwiseParallel`), the tensor inside, once it is there.
    Messages read memory, which the outer tensor does not have.
    """
    wait = None if type(x) is Tensor else getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are summed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the running lse if out is accumulated in `dtype`.

    It is float64 on the CPU. An error of lse is a relative error of all weights, and in float32
    each merge rounds a number of about 8. No other sum of the ring loses as much accuracy, and lse
    is small compared with out. On CUDA it is `dtype`, which the Triton kernel reads.
    """
    return torch.float64 if device.type == "cpu" else dtype
