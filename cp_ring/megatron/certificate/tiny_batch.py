"""The microbatch of the tiny model: random tokens in whole batch rows, in the form of a
data set's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.certificate.probe_batch import BatchRows
from cp_ring.megatron.certificate.tiny_model import VOCABULARY
from cp_ring.megatron.data.masks import KEY
from cp_ring.megatron.settings import packed_in_whole_rows

MOST_TOKENS = 1 << 20  # limit for a microbatch of the job's own length


@dataclass(frozen=True)
class Microbatch:
    """Whole batch rows [b, n] in the form of a data set's, with their documents or masks.

    positions: where the tokens of each context-parallel rank are in them, int64 [b, s].
    """

    data: dict[str, Any]
    batch_rows: BatchRows
    positions: list[Tensor]

    @classmethod
    def draw(
        cls, args: argparse.Namespace, kind: LayerKind, seed: int, distinct: bool = False
    ) -> Microbatch:
        """Draw random tokens for the job of `args`, in documents if the mask of `kind` has them.
        The loss mask differs between ranks, and has fractions.

        With `distinct`, all tokens differ, beyond any vocabulary.
        """
        cp = args.context_parallel_size
        random, batch_rows = torch.Generator().manual_seed(seed), BatchRows.draw(kind, cp)
        shape = len(batch_rows.rules), kind.tokens + 1
        tokens = (
            torch.arange(shape[0] * shape[1]).view(shape)
            if distinct
            else torch.randint(VOCABULARY, shape, generator=random)
        )
        data: dict[str, Any] = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.stack([rule.positions for rule in batch_rows.rules]),
            "loss_mask": _loss_mask(shape[0], kind.tokens, random),
        }
        if batch_rows.masks:
            data[KEY] = batch_rows.masks
        if kind.mask == "packed":  # as in the data sets of Megatron's scripts
            data["cu_seqlens"] = torch.from_numpy(batch_rows.offsets)[None].to(torch.int32)
            data["max_seqlen"] = torch.tensor([int(batch_rows.lengths.max())], dtype=torch.int32)
        batch = cls(data, batch_rows, [batch_rows.positions(rank, cp) for rank in range(cp)])
        if kind.mask in ("documents", "packed"):
            data["loss_mask"][batch.last()] = 0
        for of_rank in batch.positions:
            _count(data["loss_mask"], of_rank)
        return batch

    @classmethod
    def draw_long(cls, args: argparse.Namespace, kind: LayerKind, seed: int) -> Microbatch:
        """Draw a microbatch of the job's own length with distinct tokens, and as many batch rows as
        the job has, or as fit into `MOST_TOKENS`.
        """
        n = args.seq_length or kind.tokens
        if kind.mask == "packed" and not packed_in_whole_rows():
            n -= n % (4 * args.context_parallel_size)
        most = 1 if kind.mask == "packed" else max(1, min(args.micro_batch_size, MOST_TOKENS // n))
        return cls.draw(args, replace(kind, tokens=n, batch_size=most), seed, distinct=True)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the arguments that give its size."""
        kind = self.batch_rows.kind
        lengths = dict.fromkeys(("seq_length", "max_position_embeddings"), kind.tokens)
        return lengths | {"micro_batch_size": kind.batch_size}

    def blind(self) -> Microbatch:
        """Return a copy with other labels where the loss mask is 0."""
        labels, hidden = self.data["labels"], self.data["loss_mask"] == 0
        others = torch.where(hidden, (labels + 1) % VOCABULARY, labels)
        return replace(self, data=self.data | {"labels": others})

    def undeclared(self) -> Microbatch:
        """Return a copy without the declared masks of its batch rows."""
        data = {name: value for name, value in self.data.items() if name != KEY}
        return replace(self, data=data)

    def fresh(self) -> dict[str, Any]:
        """Return a copy of the data, because a script may write into the dictionary and its
        tensors.
        """
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.data.items()
        }

    def selected(self) -> tuple[Tensor, Tensor] | None:
        """Return positions and indices of the tokens of whole batch rows [n, b] if positions are
        declared, else None.
        """
        if not self.batch_rows.masks:
            return None
        positions = torch.stack([rule.positions for rule in self.batch_rows.rules], 1)
        return positions, torch.arange(len(positions))[:, None].expand_as(positions)

    def last(self) -> Tensor:
        """Return True for the last token of each document or declared sequence, bool [b, n]."""
        return torch.stack([rule.last() for rule in self.batch_rows.rules])


def _loss_mask(batch: int, n: int, random: torch.Generator) -> Tensor:
    """Draw zeros, and weights of up to 1.75 in quarters, which become more frequent along the
    sequence: float32 [batch, n].
    """
    some = torch.rand(batch, n, generator=random) < torch.linspace(0.4, 1.0, n)
    return some * torch.randint(1, 8, (batch, n), generator=random) / 4


def _count(mask: Tensor, of_rank: Tensor) -> None:
    """Make the loss mask of a rank, whose tokens are at `of_rank`, add up to a whole number.

    Loss functions of Megatron's scripts cut off fractions of this sum, with and without context
    parallelism.
    """
    part = mask.gather(1, of_rank)
    for batch_row, token in part.nonzero()[-1:].tolist():
        missing = -float(part.sum(dtype=torch.float64)) % 1
        mask[batch_row, of_rank[batch_row, token]] += missing
