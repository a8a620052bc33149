"""The online-softmax merge of one tile's (out, lse) into the running ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.profiler import record_function

from cp_ring.ops.fused import FusedFunction

_fused = FusedFunction("cp_ring.ops.merge_triton", "merge_")


def lse_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the running lse, where out is accumulated in `dtype`.

    It is float64 on the CPU. An error of lse is a relative error of all weights, and in float32 each merge rounds a number of
    about 8. No other sum of the ring loses as much accuracy, and lse is small compared with out. On CUDA it is `dtype`, which
    the Triton kernel reads.
    """
    return torch.float64 if device.type == "cpu" else dtype


def merge_(out: Tensor, lse: Tensor, out_tile: Tensor, lse_tile: Tensor) -> None:
    """Merges in place: the running out [b, q, h, e] in float32 (or float64) and lse [b, h, q] in `lse_dtype`.

    out += sigmoid(lse_tile - lse) * (out_tile - out);  lse = log(exp(lse) + exp(lse_tile)).
    A query that saw no key on one side (lse -inf) keeps the other side's values; on neither side, out is 0 and lse -inf.

    On CUDA, with Triton, it is one kernel that passes over memory once.
    """
    if not out.numel():
        return
    fits = out.is_cuda and out.dtype == lse.dtype == torch.float32 and out.stride(-1) == 1
    with record_function("cp_ring: merge"):
        if not (fits and _fused.run(out, lse, out_tile, lse_tile)):
            _merge_with_torch_(out, lse, out_tile, lse_tile)


def _merge_with_torch_(out: Tensor, lse: Tensor, out_tile: Tensor, lse_tile: Tensor) -> None:
    lse_tile = lse_tile.to(lse.dtype)
    # -inf - -inf is NaN: the weight of such a query is 0.
    weight = torch.sigmoid(lse_tile - lse).masked_fill_(lse_tile == -math.inf, 0.0)
    out.lerp_(out_tile.to(out.dtype), weight.to(out.dtype).transpose(1, 2)[..., None])
    torch.logaddexp(lse, lse_tile, out=lse)
