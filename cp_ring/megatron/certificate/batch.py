"""The batch rows of a probe: their masks, with samples of declared ones, their split over the ranks
as the job splits its own, and random tokens in the form of a data set's.

Shapes: b batch rows, n tokens of a batch row, s tokens that a rank holds of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron import settings
from cp_ring.megatron.adapter import compat
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import (
    DocumentParams,
    Documents,
    documents_of,
    thd_params,
)
from cp_ring.megatron.adapter.microbatch_mask import KEY
from cp_ring.megatron.certificate.dense_oracle import MaskRule, declared_rule, document_rule
from cp_ring.megatron.certificate.layer_kinds import PREFIX, LayerKind
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints

VOCABULARY = 128
TOKENS = ("input_ids", "tokens")
DOCUMENTS = 4  # of a batch row


@dataclass(frozen=True)
class Batch:
    """The batch rows of a microbatch of `kind`.

    Attributes:
        rules: the mask rule of each batch row.
        masks: the declared mask of each batch row; [] if the job's masks are not declared.
        packed: the `packed_seq_params` of layers, or None if every batch row is one document.
        positions: the indices in their batch rows of each rank's tokens, int64 [b, s].
        items: of the job's own microbatch: whole batch rows, what a whole model on this rank reads,
            and what each of its virtual stages does. [] for a drawn one.
    """

    kind: LayerKind
    rules: list[MaskRule]
    masks: list[Mask]
    packed: Any
    positions: list[Tensor]
    items: Sequence[Any] = ()

    @classmethod
    def draw(cls, kind: LayerKind, cp: int, padded: bool = False) -> Batch:
        """Draw the masks. With `padded`, packed documents have padding if the job's may."""
        n, seeds = kind.tokens, range(1, kind.batch_size + 1)
        if kind.mask.startswith(PREFIX):
            return cls.split(
                kind, n, [], [sample(kind.mask.removeprefix(PREFIX), n, seed) for seed in seeds], cp
            )
        separate = kind.mask == "packed" and not in_force().whole_rows
        unit = 4 * cp if separate else 1  # each document is split separately
        parts = 1 if kind.mask == "causal" else DOCUMENTS
        spans = [_pairs(_edges(n // unit, parts, seed) * unit) for seed in seeds]
        if padded and separate:
            spans = [each - np.outer(np.arange(1, len(each) + 1) % 3 + 1, (0, 1)) for each in spans]
        return cls.split(kind, n, spans, [], cp)

    @classmethod
    def read(cls, kind: LayerKind, cp: int, items: Sequence[Any], item: dict[str, Any]) -> Batch:
        """Read the documents or masks of the job's own microbatch: `item`, of whole batch rows, of
        which the iterators of this rank gave `items`.
        """
        b, n = next(item[name] for name in TOKENS if name in item).shape
        kind, masks, rows = replace(kind, tokens=n, batch_size=b), [], [np.array([0, n])] * b
        if kind.mask.startswith(PREFIX):
            from cp_ring.megatron.data.masks import read  # few jobs declare masks

            masks = read(item.get(KEY), b, n, settings.current().kinds)
        elif kind.mask == "packed":  # one stream
            offsets = item["cu_seqlens"].view(b, -1) + n * torch.arange(b)[:, None]
            rows = [np.unique(np.append(offsets, [0, n * b]))]
        elif kind.mask == "documents":
            ids = item["position_ids"].view(b, -1, n)  # may have three sections
            rows = [np.append(np.flatnonzero((each == 0).all(0)), n) for each in ids]
        batch = cls.split(kind, int(rows[0][-1]), [_pairs(edges) for edges in rows], masks, cp)
        own = next((each for each in items if each is not None), None)
        if own is None and compat.group_of(None, "tp").rank() == 0:  # which loads for the others
            own = item
        return replace(batch, items=[item, own, *items])

    @classmethod
    def split(cls, kind: LayerKind, n: int, spans: list[Ints], masks: list[Mask], cp: int) -> Batch:
        """Split batch rows of `n` tokens as the settings in force say. They have the `masks`, or
        documents with these `spans`, int64 [documents, 2].
        """
        ring, packed = in_force(), None
        rules = [document_rule(n, of_row.tolist()) for of_row in spans]
        if masks:
            from cp_ring.megatron.data.masks import DeclaredMask  # few jobs declare masks

            rules = [declared_rule(mask) for mask in masks]
            packed = DocumentParams.carry(DeclaredMask.of_rows(masks, cp, ring.split))
        elif kind.mask == "documents":
            starts = [of_row[:, 0] + n * number for number, of_row in enumerate(spans)]
            offsets = np.append(np.concatenate(starts), n * len(spans))
            packed = DocumentParams.carry(Documents.in_rows(offsets, len(spans), cp, ring.split))
        elif kind.mask == "packed":
            real = np.append(0, np.cumsum(np.diff(spans[0])))
            both = (torch.tensor(x, dtype=torch.int32) for x in (real, [*spans[0][:, 0], n]))
            packed = thd_params(*both)
        batch_rows = 1 if packed is None else len(rules)
        split = documents_of(packed, (batch_rows, n // cp), cp, ring)
        positions = [split.places(rank).T.expand(len(rules), -1) for rank in range(cp)]
        return cls(kind, rules, masks, packed, positions)

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
            data["cu_seqlens"] = self.packed.cu_seqlens_q_padded[None]
            data["max_seqlen"] = torch.tensor([self.packed.max_seqlen_q], dtype=torch.int32)
        return data

    def delivered(self, seed: int, number: int = 0) -> Any:
        """Return a copy of this one of `items`; else a drawn microbatch, in which tokens differ.

        The loss mask has random factors and further zeros: equal weights would not show whose they
        are.
        """
        if not self.items:
            return self.data(seed, distinct=True)
        item = copy.deepcopy(self.items[number])
        if item and isinstance(own := item.get("loss_mask"), Tensor):
            factors = self._loss_mask(torch.Generator().manual_seed(seed))
            item["loss_mask"] = own * factors.view(own.shape)
        return item

    def _loss_mask(self, random: torch.Generator) -> Tensor:
        """Draw zeros, and weights of up to 1.75 in quarters, which become more frequent along the
        sequence: float32 [b, n].

        The weights of a rank add up to a whole number: loss functions of Megatron's scripts cut off
        fractions of this sum, with and without context parallelism.
        """
        last = torch.stack([rule.last for rule in self.rules])
        b, n = last.shape
        some = torch.rand(b, n, generator=random) < torch.linspace(0.4, 1.0, n)
        mask = some * torch.randint(1, 8, (b, n), generator=random) / 4
        if self.kind.mask in ("documents", "packed"):
            mask[last] = 0
        for mine in self.positions:
            part = mask.gather(1, mine)
            for batch_row, token in part.nonzero()[-1:].tolist():
                missing = -float(part.sum(dtype=torch.float64)) % 1
                mask[batch_row, mine[batch_row, token]] += missing
        return mask


def _pairs(edges: Any) -> Ints:
    """Return the documents between offsets, int64 [documents, 2]."""
    return np.stack([edges[:-1], edges[1:]], 1)


def _edges(n: int, parts: int, seed: int) -> Ints:
    """Return offsets, int64 [parts + 1], of documents of uneven length that fill n tokens."""
    random = np.random.default_rng(seed)
    inner = np.sort(random.choice(np.arange(1, n), size=min(parts, n) - 1, replace=False))
    return np.array([0, *inner, n], dtype=np.int64)


TREE = (-1, 0, 1, 1, 0, -1)
"""The parents of its branches."""


def sample(kind: str, n: int, seed: int) -> Mask:
    """Return a mask of `n` tokens, at least 64, of a kind of `MASK_KINDS`. Each seed gives another
    mask.
    """
    random = np.random.default_rng(seed)
    cuts = [0, *sorted(random.choice(np.arange(1, n), 6, replace=False).tolist())]
    lengths, edges = np.diff(cuts).tolist(), [*cuts[::2], n]
    block = n // 9 + seed % 5
    match kind:
        case "causal" | "full":
            return Mask.causal(n) if kind == "causal" else Mask.full(n)
        case "documents":
            return Mask.documents(edges)
        case "prefix":
            return Mask.prefix(n, np.diff(edges) // 2, edges)
        case "shared-prefix":
            return Mask.shared_prefix([(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])], n)
        case "tree":
            return Mask.tree(TREE, lengths, n)
        case "global":
            return Mask.with_global(n, [(0, 1), (cuts[3], cuts[3] + 1)], (n // 8, 0))
        case "block-causal":
            return Mask.block_causal(n, block)
        case "block-diffusion":
            return Mask.block_diffusion(n, block)
    # images around a quarter and a half of the sequence, where many layouts have an edge
    size = n // 16 + seed % 5
    return Mask.images(n, [(n * i // 4 - size, n * i // 4 + size // 2) for i in (1, 2, 3)])
