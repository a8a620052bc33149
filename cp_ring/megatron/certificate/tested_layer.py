"""The attention layer that probes examine, over its context-parallel group, on one microbatch.

Shapes: s tokens of this rank, n tokens of a batch row, b batch rows, h query and g key/value heads,
d and e head sizes of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron.certificate.batch import Batch
from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.report import Probe


@dataclass(frozen=True)
class TestedLayer:
    """The job's core attention of one kind, with its context-parallel group, dtype and device, the
    seed of its random tensors, and the batch rows of its microbatch.
    """

    layer: Any
    group: Any
    dtype: torch.dtype
    device: torch.device
    seed: int
    batch: Batch
    note: str = ""  # appended to the names of its probes

    @property
    def kind(self) -> LayerKind:
        return self.batch.kind

    @cached_property
    def positions(self) -> Tensor:
        """The indices in their batch rows of this rank's tokens, int64 [b, s]."""
        return self.batch.positions[self.group.rank()].to(self.device)

    def of_kind(self, kind: LayerKind, note: str = "") -> TestedLayer:
        """Return the same layer on a microbatch of `kind`."""
        return replace(self, batch=Batch.draw(kind, self.group.size(), padded=True), note=note)

    def probe(self, name: str, error: float, bound: float, where: str) -> Probe:
        """Make the result of a probe of this layer."""
        return Probe(name + self.note, self.kind.layer_name, self.kind.mask, error, bound, where)

    def zeros(self, heads: int, size: int) -> Tensor:
        """Return zeros [b, n, heads, size] of whole batch rows."""
        shape = len(self.positions), self.kind.tokens, heads, size
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def local(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of whole batch rows: [b, n, ...] to [b, s, ...]."""
        of_each = zip(whole, self.positions, strict=True)
        return torch.stack([batch_row.index_select(0, mine) for batch_row, mine in of_each])

    def summed(self, x: Tensor) -> Tensor:
        """Sum x over the context-parallel ranks, in place, and return it."""
        if self.group.size() > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the layer with this rank's tokens of whole batch rows [b, n, heads, size]; return
        out [b, s, h, e].
        """
        from megatron.core.transformer.enums import AttnMaskType

        thd = self.kind.mask == "packed"
        local = [self.local(x) for x in (q, k, v)]
        given = [x[0] if thd else x.transpose(0, 1).contiguous() for x in local]
        named = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": self.batch.packed}
        out: Tensor = self.layer(*given, None, **named)
        return out.reshape(*self.positions.T.shape, self.kind.heads, -1).transpose(0, 1)
