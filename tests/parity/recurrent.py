"""Mamba layers for `--spec tests.parity.recurrent hybrid`, with torch in place of the CUDA kernels of mamba_ssm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from tests.parity.specs import hybrid  # noqa: F401


def scan(
    zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, a: Tensor, *,
    D: Tensor, headdim: int, ngroups: int, **ignored: Any,
) -> Tensor:  # fmt: skip
    """As `mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`, [b, n, z x B C dt] to [b, n, heads * headdim].

    The state of each head decays by exp(dt * a) and gains dt * x B; the sum over all earlier tokens is written as a matrix.
    """
    b, n, _ = zxbcdt.shape
    heads = a.numel()
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, weight.shape[0], heads], -1)
    xbc = F.silu(F.conv1d(xbc.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))[..., :n])
    x, keys, queries = xbc.transpose(1, 2).split([inner, *[(weight.shape[0] - inner) // 2] * 2], -1)
    x = x.reshape(b, n, heads, headdim)
    keys, queries = (part.reshape(b, n, ngroups, -1).repeat_interleave(heads // ngroups, 2) for part in (keys, queries))
    dt = F.softplus(dt + dt_bias)
    decay = torch.cumsum(dt * a, 1)
    passed = (decay[:, :, None] - decay[:, None]).masked_fill(torch.ones(n, n).triu(1).bool()[None, :, :, None], -torch.inf)
    weights = passed.exp() * torch.einsum("bihs,bjhs->bijh", queries, keys)
    y = torch.einsum("bijh,bjh,bjhp->bihp", weights, dt, x) + D[:, None] * x
    return y.reshape(b, n, inner) * F.silu(z)


class GroupNorm(torch.nn.Module):
    """RMS norm of each group of channels."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: torch.dtype, **ignored: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size, dtype=dtype)), eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.mamba_split_conv1d_scan_combined = scan
mamba_mixer.ExtendedRMSNorm = GroupNorm
