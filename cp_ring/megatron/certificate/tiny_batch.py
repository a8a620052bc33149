"""The microbatch of the tiny model: random tokens in whole batch rows, as a data set gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.declared import PREFIX
from cp_ring.megatron.certificate.dense_oracle import MaskRule, Spans
from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.probe_batch import (
    SplitBatch,
    declared_of_rows,
    documents_of_rows,
    packed_offsets,
    packed_positions,
    random_offsets,
    samples_of_rows,
    spans_between,
)
from cp_ring.megatron.certificate.tiny_model import VOCABULARY
from cp_ring.megatron.data.masks import KEY


@dataclass(frozen=True)
class Microbatch:
    """Whole batch rows [b, n] as a data set gives them, and the documents of each, or the rule of
    the mask that it declares.
    """

    data: dict[str, Any]
    spans: list[Spans | MaskRule]

    @classmethod
    def draw(cls, kind: LayerKind, seed: int, cp: int, distinct: bool = False) -> Microbatch:
        """Random tokens, in documents where the mask of `kind` has them; the loss mask differs
        between ranks, and has fractions.

        With `distinct` each token is another, beyond any vocabulary.
        """
        random, n = torch.Generator().manual_seed(seed), kind.tokens
        spans: list[Spans | MaskRule] = []
        more: dict[str, Any] = {}
        if kind.mask.startswith(PREFIX):
            more[KEY], rules = samples_of_rows(kind)
            spans += rules
        elif kind.mask == "packed":  # as the data sets of Megatron's scripts have it
            offsets = packed_offsets(n, cp)
            spans += [spans_between(offsets)]
            more["cu_seqlens"] = torch.from_numpy(offsets)[None].to(torch.int32)
            more["max_seqlen"] = torch.tensor([int(np.diff(offsets).max())], dtype=torch.int32)
        else:
            cuts = 0 if kind.mask == "causal" else 3
            numbers = range(1, kind.batch_size + 1)
            spans += [spans_between(random_offsets(n, cuts, number)) for number in numbers]
        shape = len(spans), n + 1
        tokens = (
            torch.arange(shape[0] * shape[1]).view(shape)
            if distinct
            else torch.randint(VOCABULARY, shape, generator=random)
        )
        data = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.stack([_positions_of_row(of_row) for of_row in spans]),
            "loss_mask": _loss_mask(len(spans), n, random),
        }
        batch = cls(data | more, spans)
        if kind.mask in ("documents", "packed"):
            data["loss_mask"][batch.last()] = 0
        return batch

    def counted(self, positions: list[Tensor]) -> None:
        """Makes the loss mask of each rank, whose tokens are at `positions`, add up to a whole
        number.

        Loss functions of Megatron's scripts cut off fractions of this number, with and without
        context parallelism.
        """
        mask = self.data["loss_mask"]
        for of_rank in positions:
            part = mask.gather(1, of_rank)
            places = part.nonzero()
            if len(places):
                batch_row, token = (int(x) for x in places[-1])
                mask[batch_row, of_rank[batch_row, token]] += (
                    -float(part.sum(dtype=torch.float64)) % 1
                )

    def blind(self) -> Microbatch:
        """The same with other labels where the loss mask is 0."""
        labels, hidden = self.data["labels"], self.data["loss_mask"] == 0
        others = torch.where(hidden, (labels + 1) % VOCABULARY, labels)
        return Microbatch(self.data | {"labels": others}, self.spans)

    def fresh(self) -> dict[str, Any]:
        """A copy of the data: a script may write into the dictionary and its tensors."""
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.data.items()
        }

    def selected(self) -> tuple[Tensor, Tensor] | None:
        """Positions and places of the tokens of whole batch rows [n, b], where positions are
        declared.
        """
        rules = [rule for rule in self.spans if isinstance(rule, MaskRule)]
        if not rules:
            return None
        positions = torch.stack([rule.positions for rule in rules], 1)
        return positions, torch.arange(len(positions))[:, None].expand_as(positions)

    def last(self) -> Tensor:
        """True for the last token of each document or declared sequence, bool [b, n]."""
        last = torch.zeros(self.data["tokens"].shape, dtype=torch.bool)
        for batch_row, spans in enumerate(self.spans):
            if isinstance(spans, MaskRule):
                last[batch_row] = spans.last()
            else:
                last[batch_row, [end - 1 for _, end in spans]] = True
        return last


def _positions_of_row(spans: Spans | MaskRule) -> Tensor:
    """The positions of the tokens in their documents, int64 [n]."""
    if isinstance(spans, MaskRule):
        return spans.positions
    return torch.cat([torch.arange(end - start) for start, end in spans])


def _loss_mask(batch: int, n: int, random: torch.Generator) -> Tensor:
    """Zeros, and weights of up to 1.75 in quarters, which become more often along the sequence:
    float32 [batch, n].
    """
    some = torch.rand(batch, n, generator=random) < torch.linspace(0.4, 1.0, n)
    return some * torch.randint(1, 8, (batch, n), generator=random) / 4


def rank_positions(
    batch: Microbatch, kind: LayerKind, rank: int, cp: int, split: SplitBatch
) -> Tensor:
    """Where the tokens of a rank are in their batch rows, int64 [b, s], as the job's own split has
    them.
    """
    whole = torch.arange(kind.tokens).expand(len(batch.spans), -1)
    if kind.mask == "packed":
        offsets = batch.data["cu_seqlens"][0].numpy().astype(np.int64)
        return packed_positions(offsets, rank, cp)[None]
    if kind.mask == "documents":
        spans = [spans for spans in batch.spans if not isinstance(spans, MaskRule)]
        return torch.as_tensor(documents_of_rows(spans, kind.tokens, cp).shard(whole, rank))
    if kind.mask.startswith(PREFIX):
        return torch.as_tensor(declared_of_rows(batch.data[KEY], cp).shard(whole, rank))
    return split({"tokens": whole}, rank, cp)["tokens"]
