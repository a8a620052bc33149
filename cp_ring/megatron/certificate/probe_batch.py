"""The batch rows of a probe: their masks, and the tokens that each rank holds, split as the job
splits its own batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import MaskRule, document_rule
from cp_ring.megatron.certificate.layer_kinds import PREFIX, LayerKind
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints

CHANNELS = 512
"""Maximum number of value channels in a mask probe; the weight of a probe with latents grows with
it.
"""


@dataclass(frozen=True)
class BatchRows:
    """The batch rows of a microbatch of `kind`, and their split over the job's ranks.

    Attributes:
        rules: the mask rule of each batch row.
        masks: the declared mask of each batch row; [] if the job's masks are not declared.
        offsets: of documents in the stream of all batch rows, with their padding: int64
            [documents + 1].
        lengths: of these documents, without padding: int64 [documents].
    """

    kind: LayerKind
    rules: list[MaskRule]
    masks: list[Mask]
    offsets: Ints
    lengths: Ints

    @classmethod
    def draw(cls, kind: LayerKind, cp: int, padded: bool = False) -> BatchRows:
        """Draw batch rows for `cp` ranks. With `padded`, packed documents have padding if the job's
        may.
        """
        n, seeds = kind.tokens, range(1, kind.batch_size + 1)
        nothing = np.zeros(0, np.int64)
        if kind.mask.startswith(PREFIX):
            from cp_ring.megatron.certificate.user_masks import sample  # few jobs declare masks

            samples = [sample(kind.mask.removeprefix(PREFIX), n, seed) for seed in seeds]
            masks, rules = map(list, zip(*samples, strict=True))
            return cls(kind, rules, masks, nothing, nothing)
        cuts, unit = 0 if kind.mask == "causal" else 3, 1
        if kind.mask == "packed" and not packed_in_whole_rows():
            unit = 4 * cp  # each document is split separately
        edges = [_random_offsets(n // unit, cuts, seed) * unit for seed in seeds]
        lengths = [np.diff(of_row) for of_row in edges]
        if padded and unit > 1:
            lengths = [each - np.arange(1, len(each) + 1) % 3 - 1 for each in lengths]
        spans = [
            np.stack([of_row[:-1], of_row[:-1] + each], 1).tolist()
            for of_row, each in zip(edges, lengths, strict=True)
        ]
        ends = [of_row[1:] + n * batch_row for batch_row, of_row in enumerate(edges)]
        rules = [document_rule(n, of_row) for of_row in spans]
        return cls(kind, rules, [], np.concatenate([[0], *ends]), np.concatenate(lengths))

    def carried(self, cp: int) -> Any:
        """Return the documents or masks that travel beside tensors [b, n], split as the settings in
        force say; None without any.
        """
        # both import Megatron
        from cp_ring.megatron.data.documents import Documents
        from cp_ring.megatron.data.masks import DeclaredMask

        if self.masks:
            return DeclaredMask.of_rows(self.masks, current().layout, cp)
        if self.kind.mask == "documents":
            return Documents.in_rows(self.offsets, len(self.rules), current().layout, cp)
        return None

    def positions(self, rank: int, cp: int) -> Tensor:
        """Return the indices in their batch rows of a rank's tokens, int64 [b, s]."""
        from cp_ring.megatron.data.rows import on_this_cp_rank  # imports Megatron

        if self.kind.mask == "packed":
            # imports Megatron
            from cp_ring.megatron.data.documents import packed_layout

            layout = (
                packed_layout(self.offsets, cp)
                if packed_in_whole_rows()
                else Layout.per_document_zigzag(self.offsets, cp)
            )
            return torch.from_numpy(layout.positions(rank))[None]
        whole = torch.arange(self.kind.tokens).expand(len(self.rules), -1)
        carried = self.carried(cp)
        mine: Tensor = (
            on_this_cp_rank({"tokens": whole}, rank, cp)["tokens"]
            if carried is None
            else carried.shard(whole, rank)
        )
        return mine

    def params(self, cp: int) -> Any:
        """Return the `packed_seq_params` of a layer."""
        # imports Megatron
        from cp_ring.megatron.data.documents import DocumentParams, thd_params

        if self.kind.mask == "packed":
            ends = np.append(0, np.cumsum(self.lengths)), self.offsets
            return thd_params(*(torch.from_numpy(edges).to(torch.int32) for edges in ends))
        carried = self.carried(cp)
        return None if carried is None else DocumentParams.carry(carried)


@dataclass(frozen=True)
class ProbeBatch:
    """The batch rows of a probe of one layer, on one rank.

    Attributes:
        positions: the indices in their batch rows of this rank's tokens, int64 [b, s].
        rules: the mask rule of each batch row.
        packed: the layer's `packed_seq_params`.
        edges: positions at which a mask is most likely wrong: beside edges of chunks, documents and
            windows.
    """

    positions: Tensor
    rules: list[MaskRule]
    packed: Any
    edges: tuple[int, ...]

    @classmethod
    def make(cls, kind: LayerKind, group: Any, device: torch.device) -> ProbeBatch:
        """Make the probe batch of this rank of `group`."""
        cp = group.size()
        batch_rows = BatchRows.draw(kind, cp, padded=True)
        chunks = [kind.tokens * i // (2 * cp) for i in range(2 * cp)]
        bounds = [edge for rule in batch_rows.rules for edge in rule.edges]
        windows = [edge + kind.probed[0] for edge in chunks] if kind.probed[0] >= 0 else []
        near = {
            min(max(edge + side, 0), kind.tokens - 1)
            for edge in (*chunks, *bounds, *windows)
            for side in (-1, 0, 1)
        }
        positions = batch_rows.positions(group.rank(), cp).to(device)
        return cls(positions, batch_rows.rules, batch_rows.params(cp), tuple(sorted(near)))

    def local(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of whole batch rows: [b, n, ...] to [b, s, ...]."""
        of_each = zip(whole, self.positions, strict=True)
        return torch.stack([batch_row.index_select(0, mine) for batch_row, mine in of_each])


def _random_offsets(n: int, cuts: int, seed: int) -> Ints:
    """Return offsets, int64 [cuts + 2], of documents of uneven length that fill n tokens."""
    random = np.random.default_rng(seed)
    inner = np.sort(random.choice(np.arange(1, n), size=min(cuts, n - 1), replace=False))
    return np.array([0, *inner, n], dtype=np.int64)
