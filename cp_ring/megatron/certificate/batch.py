"""The batch rows of a probe: their masks, their split over the ranks as the job splits its own, and
random tokens in the form of a data set's.

Shapes: b batch rows, n tokens of a batch row, s tokens that a rank holds of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import MaskRule, declared_rule, document_rule
from cp_ring.megatron.certificate.layer_kinds import PREFIX, LayerKind
from cp_ring.megatron.data.documents import DocumentParams, Documents, documents_of, thd_params
from cp_ring.megatron.data.masks import KEY, DeclaredMask
from cp_ring.megatron.plans import make_layout
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints

VOCABULARY = 128
DOCUMENTS = 4  # of a batch row


@dataclass(frozen=True)
class Batch:
    """The batch rows of a microbatch of `kind`, for `cp` ranks.

    Attributes:
        rules: the mask rule of each batch row.
        masks: the declared mask of each batch row; [] if the job's masks are not declared.
        offsets: of documents in the stream of all batch rows, with their padding: int64
            [documents + 1].
        lengths: of these documents, without padding: int64 [documents].
        positions: the indices in their batch rows of each rank's tokens, int64 [b, s].
    """

    kind: LayerKind
    cp: int
    rules: list[MaskRule]
    masks: list[Mask]
    offsets: Ints
    lengths: Ints
    positions: tuple[Tensor, ...] = ()

    @classmethod
    def draw(cls, kind: LayerKind, cp: int, padded: bool = False) -> Batch:
        """Draw the masks. With `padded`, packed documents have padding if the job's may."""
        n, seeds = kind.tokens, range(1, kind.batch_size + 1)
        if kind.mask.startswith(PREFIX):
            from cp_ring.megatron.certificate.user_masks import sample  # few jobs declare masks

            masks = [sample(kind.mask.removeprefix(PREFIX), n, seed) for seed in seeds]
            rules, none = [declared_rule(mask) for mask in masks], np.zeros(0, np.int64)
            return cls(kind, cp, rules, masks, none, none)._split()
        unit = 1
        if kind.mask == "packed" and not packed_in_whole_rows():
            unit = 4 * cp  # each document is split separately
        parts = 1 if kind.mask == "causal" else DOCUMENTS
        rules, ends, lengths = [], [0], list[int]()
        for batch_row, seed in enumerate(seeds):
            edges = _edges(n // unit, parts, seed) * unit
            real = np.diff(edges)
            if padded and unit > 1:
                real -= np.arange(1, len(real) + 1) % 3 + 1
            spans = np.stack([edges[:-1], edges[:-1] + real], 1)
            rules.append(document_rule(n, spans.tolist()))
            ends += (edges[1:] + n * batch_row).tolist()
            lengths += real.tolist()
        return cls(kind, cp, rules, [], np.array(ends), np.array(lengths))._split()

    def _split(self) -> Batch:
        """Add the positions, as the settings in force split the batch rows."""
        n, b, cp, params = self.kind.tokens, len(self.rules), self.cp, self.params()
        if params is None:
            layout = make_layout(current().layout, n, cp)
            ranks = [torch.from_numpy(layout.positions(r)).expand(b, -1) for r in range(cp)]
        else:
            split = documents_of(params, n * b // cp, cp, packed_in_whole_rows())
            ranks = [split.places(rank).T for rank in range(cp)]
        return replace(self, positions=tuple(ranks))

    def params(self) -> Any:
        """Return the `packed_seq_params` of a layer, split as the settings in force say; None if
        every batch row is one document.
        """
        if self.masks:
            return DocumentParams.carry(DeclaredMask.of_rows(self.masks, current().layout, self.cp))
        if self.kind.mask == "documents":
            in_rows = Documents.in_rows(self.offsets, len(self.rules), current().layout, self.cp)
            return DocumentParams.carry(in_rows)
        if self.kind.mask == "packed":
            ends = np.append(0, np.cumsum(self.lengths)), self.offsets
            return thd_params(*(torch.from_numpy(edges).to(torch.int32) for edges in ends))
        return None

    def last(self) -> Tensor:
        """Return True for the last token of each document or declared sequence, bool [b, n]."""
        return torch.stack([rule.last for rule in self.rules])

    def data(self, seed: int, distinct: bool = False, blind: bool = False) -> dict[str, Any]:
        """Draw a microbatch. The loss mask differs between ranks, and has fractions. A new one each
        time, because a script may write into the dictionary and its tensors.

        With `distinct`, all tokens differ, beyond any vocabulary. With `blind`, labels are others
        where the loss mask is 0.
        """
        random, shape = torch.Generator().manual_seed(seed), (len(self.rules), self.kind.tokens + 1)
        tokens = (
            torch.arange(shape[0] * shape[1]).view(shape)
            if distinct
            else torch.randint(VOCABULARY, shape, generator=random)
        )
        loss_mask, labels = self._loss_mask(random), tokens[:, 1:].contiguous()
        if blind:
            labels = torch.where(loss_mask == 0, (labels + 1) % VOCABULARY, labels)
        data: dict[str, Any] = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": labels,
            "position_ids": torch.stack([rule.positions for rule in self.rules]),
            "loss_mask": loss_mask,
        }
        if self.masks:
            data[KEY] = self.masks
        if self.kind.mask == "packed":  # as in the data sets of Megatron's scripts
            data["cu_seqlens"] = torch.from_numpy(self.offsets)[None].to(torch.int32)
            data["max_seqlen"] = torch.tensor([int(self.lengths.max())], dtype=torch.int32)
        return data

    def _loss_mask(self, random: torch.Generator) -> Tensor:
        """Draw zeros, and weights of up to 1.75 in quarters, which become more frequent along the
        sequence: float32 [b, n].

        The weights of a rank add up to a whole number: loss functions of Megatron's scripts cut off
        fractions of this sum, with and without context parallelism.
        """
        b, n = len(self.rules), self.kind.tokens
        some = torch.rand(b, n, generator=random) < torch.linspace(0.4, 1.0, n)
        mask = some * torch.randint(1, 8, (b, n), generator=random) / 4
        if self.kind.mask in ("documents", "packed"):
            mask[self.last()] = 0
        for mine in self.positions:
            part = mask.gather(1, mine)
            for batch_row, token in part.nonzero()[-1:].tolist():
                missing = -float(part.sum(dtype=torch.float64)) % 1
                mask[batch_row, mine[batch_row, token]] += missing
        return mask


def _edges(n: int, parts: int, seed: int) -> Ints:
    """Return offsets, int64 [parts + 1], of documents of uneven length that fill n tokens."""
    random = np.random.default_rng(seed)
    inner = np.sort(random.choice(np.arange(1, n), size=min(parts, n) - 1, replace=False))
    return np.array([0, *inner, n], dtype=np.int64)
