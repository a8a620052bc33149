"""Recurrences as kernels compute them, with states at both ends of sequences and their affine maps.

Shapes: T tokens of several sequences, end to end; h heads; k and v channels of keys and of values.
A state is [h, k, v], a map [B, A] is [h, k, v + k]: S_out = A S_in + B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.ranges import Ints

Tensors = dict[str, Tensor]


class DeltaRule:
    """Delta rules by fla's `chunk_gated_delta_rule`, `chunk_kda` or `chunk_gdn2`: q, k [T, h, k], v
    [T, h, v], and gates (Gated Delta Networks, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692).

    The maps are states too: those after v = 0 from the state I are A.

    plain: whether the function takes batch rows of one sequence alone, without `cu_seqlens`.
    """

    def __init__(self, function: Callable[..., Any], plain: bool = False, **named: Any):
        self._function, self._plain, self._named = function, plain, named

    def scan(
        self, tensors: Tensors, size: Ints, entry: Tensor | None, ends: bool
    ) -> tuple[Tensor, Any]:
        """Return the outputs [T, h, v] of sequences of these sizes, and with `ends` the states
        [sequences, h, k, v] after them. `entry` has the states before them; None is 0.
        """

        def call(tensors: Tensors, entry: Tensor | None, **named: Any) -> Any:
            named |= self._named
            return self._function(**tensors, **named, initial_state=entry, output_final_state=ends)

        if self._plain:
            return _one_by_one(call, tensors, size, entry)
        offsets = torch.from_numpy(np.append(0, np.cumsum(size)))
        rows = {name: x[None] for name, x in tensors.items()}
        out, states = call(rows, entry, cu_seqlens=offsets.to(rows["v"].device))
        return out[0], states

    def maps(self, tensors: Tensors, size: Ints) -> Tensor:
        """Return the maps of the sequences, [sequences, h, k, v + k]."""
        (_, heads, k), v = tensors["q"].shape, tensors["v"].shape[-1]
        wide = {name: F.pad(tensors[name], (0, k)) for name in ("v", "w") if name in tensors}
        dtype = sum_dtype(tensors["v"].dtype)
        device = tensors["v"].device
        eye = F.pad(torch.eye(k, dtype=dtype, device=device), (v, 0))
        return self.scan(tensors | wide, size, eye.repeat(len(size), heads, 1, 1), True)[1]


class MambaScan:
    """Mamba 2 by `mamba_chunk_scan_combined` of mamba_ssm: x and z [T, h, p], dt [T, h], B and C
    [T, groups, n] (Transformers are SSMs, arXiv 2405.21060).

    The state of a head decays by one number, so it is a row of p * n channels here: k is 1. The
    kernel takes batch rows with one state, so sequences with states are calls of their own. Its
    other sequences share one batch row.

    bias: of dt, [h].
    a: the decay of each head, [h], below 0.
    """

    def __init__(self, function: Callable[..., Any], bias: Tensor, a: Tensor, **named: Any):
        self._function, self._a, self._bias = function, a, bias
        self._named = {"dt_bias": bias, "dt_softplus": True, **named}

    def scan(
        self, tensors: Tensors, size: Ints, entry: Tensor | None, ends: bool
    ) -> tuple[Tensor, Any]:
        """As `DeltaRule.scan`."""

        def call(tensors: Tensors, entry: Tensor | None, numbers: Any = None) -> tuple[Tensor, Any]:
            x = tensors["x"]
            if entry is not None:
                sizes = x.shape[3], tensors["B"].shape[3]
                entry = entry[:, :, 0].unflatten(2, sizes)
            out = self._function(
                **tensors,
                **self._named,
                A=self._a,
                initial_states=entry,
                seq_idx=numbers,
                return_final_states=ends,
            )
            if not ends:
                return out, None
            return out[0], out[1].flatten(2)[:, :, None].to(sum_dtype(x.dtype))

        if ends or entry is not None:
            return _one_by_one(call, tensors, size, entry)
        numbers = torch.from_numpy(np.repeat(np.arange(len(size)), size)).int()
        rows = {name: x[None] for name, x in tensors.items()}
        out, _ = call(rows, None, numbers[None].to(rows["x"].device))
        return out[0], None

    def maps(self, tensors: Tensors, size: Ints) -> Tensor:
        b = self.scan(tensors, size, None, True)[1]
        steps = F.softplus(tensors["dt"].to(b.dtype) + self._bias) * self._a
        decay = torch.stack([each.sum(0) for each in steps.split(size.tolist())]).exp()
        return torch.cat([b, decay[..., None, None]], -1)


Recurrence = DeltaRule | MambaScan


def _one_by_one(
    call: Callable[..., tuple[Tensor, Any]], tensors: Tensors, size: Ints, entry: Tensor | None
) -> tuple[Tensor, Any]:
    """Return outputs and states of sequences that are calls of their own."""
    parts = zip(*(x[None].split(size.tolist(), 1) for x in tensors.values()), strict=True)
    entries = [None] * len(size) if entry is None else entry.split(1)
    found = [
        call(dict(zip(tensors, part, strict=True)), before)
        for part, before in zip(parts, entries, strict=True)
    ]
    outs, states = zip(*found, strict=True)
    return torch.cat(outs, 1)[0], None if states[0] is None else torch.cat(states)
