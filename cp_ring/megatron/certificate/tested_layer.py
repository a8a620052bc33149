"""The attention layer that probes examine, over its context-parallel group, on one microbatch.

Shapes: s tokens of this rank, n tokens of a batch row, b batch rows, h query and g key/value heads,
d and e head sizes of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.probe_batch import ProbeBatch
from cp_ring.megatron.certificate.report import Probe

if TYPE_CHECKING:
    from cp_ring.comm.latent import Latents


@dataclass(frozen=True)
class TestedLayer:
    """The job's core attention of one kind, with its context-parallel group, dtype and device, the
    seed of its random tensors, and the microbatch of this rank.
    """

    kind: LayerKind
    layer: Any
    group: Any
    dtype: torch.dtype
    device: torch.device
    seed: int
    batch: ProbeBatch
    note: str = ""  # appended to the names of its probes

    def of_kind(self, kind: LayerKind, note: str = "") -> TestedLayer:
        """Return the same layer on a microbatch of `kind`."""
        batch = ProbeBatch.make(kind, self.group, self.device)
        return replace(self, kind=kind, batch=batch, note=note)

    @property
    def of_latents(self) -> bool:
        """Return True if latents travel instead of keys and values."""
        return getattr(self.layer, "tap", None) is not None

    def probe(self, name: str, error: float, bound: float, where: str) -> Probe:
        """Make the result of a probe of this layer."""
        return Probe(name + self.note, self.kind.layer_name, self.kind.mask, error, bound, where)

    def zeros(self, heads: int, size: int) -> Tensor:
        """Return zeros [b, n, heads, size] of whole batch rows."""
        shape = len(self.batch.rules), self.kind.tokens, heads, size
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def equal_scores(self) -> tuple[Tensor, Tensor]:
        """Return zero queries [b, n, h, d] and keys [b, n, g, d], which give visible keys equal
        weights.
        """
        return self.zeros(self.kind.heads, self.kind.d), self.zeros(self.kind.groups, self.kind.d)

    def summed(self, x: Tensor) -> Tensor:
        """Sum x over the context-parallel ranks, in place, and return it."""
        if self.group.size() > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def draw_sink(self) -> None:
        """Give learnable sinks random values, the same on all ranks of a group."""
        if self.kind.sink == "learnable":
            sink = self.layer.softmax_offset
            seed = self.seed + 1 + dist.get_global_rank(self.group, 0)
            drawn = torch.randn(sink.shape, generator=torch.Generator().manual_seed(seed)) + 1.0
            with torch.no_grad():
                sink.copy_(drawn)

    def call(self, q: Tensor, k: Tensor, v: Tensor, latents: Latents | None = None) -> Tensor:
        """Call the layer with this rank's tokens of whole batch rows [b, n, heads, size]; return
        out [b, s, h, e].

        Keys and values were made from `latents` [b, n, c]; the default are latents that make the
        values.
        """
        thd = self.kind.mask == "packed"

        def local(x: Tensor) -> Tensor:
            mine = self.batch.local(x)
            return mine[0] if thd else mine.transpose(0, 1).contiguous()

        if self.of_latents:
            from cp_ring.megatron.certificate import latent_probe

            whole = latents or latent_probe.copies(k, v, self.layer.config.qk_head_dim)
            mine = whole._replace(latent=local(whole.latent))
            self.layer.tap = SimpleNamespace(take=lambda *sizes: mine)  # replaces a LatentTap
        out = self.layer(*map(local, (q, k, v)), None, packed_seq_params=self.batch.packed)
        out = out[:, None] if thd else out
        heads: Tensor = out.unflatten(-1, (self.kind.heads, -1)).transpose(0, 1)
        return heads
