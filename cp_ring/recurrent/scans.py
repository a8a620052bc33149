"""Recurrences as kernels compute them, with states at both ends of sequences and their affine maps.

Shapes: T tokens of several sequences, end to end; h heads; k and v channels of keys and of values.
A state is [h, k, v], a map [B, A] is [h, k, v + k]: S_out = A S_in + B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.ranges import Ints

Tensors = dict[str, Tensor]


class Recurrence(Protocol):
    """A recurrence over sequences of the given sizes, of tensors [T, ...] by name."""

    def scan(
        self, tensors: Tensors, size: Ints, entry: Tensor | None, ends: bool
    ) -> tuple[Tensor, Any]:
        """Return the outputs [T, h, v], and with `ends` the states [sequences, h, k, v] after the
        sequences. `entry` has the states before them; None is 0.
        """

    def maps(self, tensors: Tensors, size: Ints) -> Tensor:
        """Return the maps of the sequences, [sequences, h, k, v + k]."""

    def none(self, tensors: Tensors) -> Tensor:
        """Return the maps of no sequence, with a gradient."""


class DeltaRule:
    """Delta rules by fla's `chunk_gated_delta_rule`, `chunk_kda` or `chunk_gdn2`: q, k [T, h, k], v
    [T, h, v], and gates (Gated Delta Networks, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692).

    The maps are states too: those after v = 0 from the state I are A.
    """

    def __init__(self, function: Callable[..., Any], **named: Any):
        self._function, self._named = function, named

    def scan(
        self, tensors: Tensors, size: Ints, entry: Tensor | None, ends: bool
    ) -> tuple[Tensor, Any]:
        device = tensors["v"].device
        out, states = self._function(
            **{name: x[None] for name, x in tensors.items()}, **self._named,
            initial_state=entry, output_final_state=ends,
            cu_seqlens=torch.from_numpy(np.append(0, np.cumsum(size))).to(device),
        )  # fmt: skip
        return out[0], states

    def maps(self, tensors: Tensors, size: Ints) -> Tensor:
        (_, heads, k), v = tensors["q"].shape, tensors["v"].shape[-1]
        wide = {name: F.pad(tensors[name], (0, k)) for name in ("v", "w") if name in tensors}
        dtype, device = sum_dtype(tensors["v"].dtype), tensors["v"].device
        eye = F.pad(torch.eye(k, dtype=dtype, device=device), (v, 0))
        return self.scan(tensors | wide, size, eye.repeat(len(size), heads, 1, 1), True)[1]

    def none(self, tensors: Tensors) -> Tensor:
        (_, heads, k), v = tensors["q"].shape, tensors["v"]
        return v[:0].to(sum_dtype(v.dtype)).reshape(0, heads, k, v.shape[-1] + k)


class MambaScan:
    """Mamba 2 by `mamba_chunk_scan_combined` of mamba_ssm: x and z [T, h, p], dt [T, h], B and C
    [T, groups, n] (Transformers are SSMs, arXiv 2405.21060).

    The state of a head decays by one number, so it is a row of p * n channels here: k is 1. The
    kernel takes batch rows with one state, so sequences with states are calls of their own. Its
    other sequences share one batch row.

    a: the decay of each head, [h], below 0.
    bias: of dt, [h].
    """

    def __init__(self, function: Callable[..., Any], a: Tensor, bias: Tensor, **named: Any):
        self._function, self._a, self._bias = function, a, bias
        self._named = {"dt_bias": bias, "dt_softplus": True, **named}

    def scan(
        self, tensors: Tensors, size: Ints, entry: Tensor | None, ends: bool
    ) -> tuple[Tensor, Any]:
        apart = size.tolist() if ends or entry is not None else [int(size.sum())]
        parts = zip(*(x[None].split(apart, 1) for x in tensors.values()), strict=True)
        outs, states = [], []
        for number, part in enumerate(parts):
            named = dict(zip(tensors, part, strict=True)) | self._named
            x, b = named["x"], named["B"]
            if entry is not None:
                state = entry[number].unflatten(2, (x.shape[3], b.shape[3])).transpose(0, 1)
                named["initial_states"] = state
            elif not ends:
                numbers = np.repeat(np.arange(len(size), dtype=np.int32), size)
                named["seq_idx"] = torch.from_numpy(numbers)[None].to(x.device)
            found = self._function(A=self._a, return_final_states=ends, **named)
            outs.append((found[0] if ends else found)[0])
            if ends:
                states.append(found[1].flatten(2)[:, :, None].to(sum_dtype(x.dtype)))
        return torch.cat(outs), torch.cat(states) if ends else None

    def maps(self, tensors: Tensors, size: Ints) -> Tensor:
        b = self.scan(tensors, size, None, True)[1]
        steps = F.softplus(tensors["dt"].to(b.dtype) + self._bias) * self._a
        decay = torch.stack([each.sum(0) for each in steps.split(size.tolist())]).exp()
        return torch.cat([b, decay[..., None, None]], -1)

    def none(self, tensors: Tensors) -> Tensor:
        x, b = tensors["x"], tensors["B"]
        channels = x.shape[2] * b.shape[2] + 1
        return x[:0].to(sum_dtype(x.dtype)).reshape(0, x.shape[1], 1, channels)
