"""A microbatch, drawn or the one that the job trains on first, as its data set, sampler and collate
function make it: the masks of its batch rows, with samples of declared ones, and their split over
the ranks as the job splits its own.

Shapes: b batch rows, n tokens of a batch row, s tokens that a rank holds of it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask
from cp_ring.megatron.certificate.dense_oracle import MaskRule, declared_rule, document_rule
from cp_ring.plan.mask import Mask

VOCABULARY = 128
TOKENS = ("input_ids", "tokens")
PREFIX = "declared "  # of the kinds of `mask_kinds` in the certificate, as in `declared tree`


@dataclass(frozen=True)
class Batch:
    """A microbatch.

    Attributes:
        mask: `causal`, `documents` (boundaries in sbhd), `packed` (thd with padding), or `declared`
            and a kind of `mask_kinds`.
        items: dictionaries of tensors [b, n]: whole batch rows, what a whole model on this rank
            reads, and what each of its virtual stages does; a single one for a drawn microbatch,
            which all of them read.
        shape: (b, n).
        rules: the mask rule of each batch row; packed documents are one row.
        packed: the `packed_seq_params` of layers, or None if every batch row is one document.
        split: the `MicrobatchMask` that says which tokens a rank holds.
    """

    mask: str
    items: Sequence[Any]
    shape: tuple[int, int]
    rules: list[MaskRule]
    packed: Any
    split: MicrobatchMask

    @property
    def about(self) -> tuple[str, str]:
        """What probes of this microbatch are called: its size, and its mask."""
        return "microbatch of {}x{} tokens".format(*self.shape), self.mask

    @cached_property
    def mine(self) -> Tensor:
        """The indices in their batch rows of this rank's tokens, int64 [rows, s]."""
        return self.split.places(compat.group_of(None, "cp").rank()).T.to(own_device())

    def on_rank(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of whole batch rows: [rows, n, ...] to [rows, s, ...]."""
        return whole[torch.arange(len(whole))[:, None], self.mine]

    @classmethod
    def draw(cls, mask: str, rows: int, n: int, cp: int, padded: bool = False) -> Batch:
        """Draw `rows` batch rows, or one of packed documents, of about `n` tokens, all of them
        different and beyond any vocabulary. With `padded`, packed documents have padding if the
        job's may.
        """
        separate = mask == "packed" and not in_force().whole_rows
        unit = 4 * cp if separate else 1  # each document is split separately
        n -= n % unit
        b = 1 if mask == "packed" else rows
        tokens = torch.arange(n) + (n + 1) * torch.arange(b)[:, None]
        item: Any = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(b, n)}
        kind = "documents" if mask == "packed" else mask.removeprefix(PREFIX)
        masks = [sample(kind, n, seed, unit) for seed in range(1, b + 1)]
        places = np.stack([each.positions for each in masks])
        item["position_ids"] = torch.from_numpy(places)
        if mask == "packed":  # as in the data sets of Megatron's scripts
            offsets = np.append(np.flatnonzero(places == 0), n)
            item["cu_seqlens"] = torch.tensor(offsets[None], dtype=torch.int32)
            item["max_seqlen"] = item["cu_seqlens"].diff().max(1).values
        elif kind != mask:
            item[KEY] = masks
        return cls.read(mask, [item], cp, padded and separate)

    @classmethod
    def read(cls, mask: str, items: Sequence[Any], cp: int, padded: bool = False) -> Batch:
        """Read the documents or masks of a microbatch from its whole batch rows, and split them as
        the settings in force say. With `padded`, documents end with padding.
        """
        item, ring, packed = items[0], in_force(), None
        b, n = shape = next(item[name] for name in TOKENS if name in item).shape
        rows, n = (1, b * n) if mask == "packed" else (b, n)  # one stream
        edges = n * np.arange(rows + 1)
        if mask == "packed":
            offsets = item["cu_seqlens"].view(b, -1) + shape[1] * torch.arange(b)[:, None]
            edges = np.union1d(edges, offsets)
        elif mask == "documents":
            ids = item["position_ids"].view(b, -1, n)  # may have three sections
            edges = np.union1d(edges, np.flatnonzero((ids == 0).all(1)))
        spans = np.stack([edges[:-1], edges[1:]], 1)
        if padded:
            spans[:, 1] -= np.arange(1, len(edges)) % 3 + 1
        rules = [
            document_rule(n, (spans[spans[:, 0] // n == row] - n * row).tolist())
            for row in range(rows)
        ]
        if mask.startswith(PREFIX):
            from cp_ring.megatron.data.masks import DeclaredMask, read  # few jobs declare masks

            masks = read(item.get(KEY), b, n, settings.current().kinds)
            rules = [declared_rule(each) for each in masks]
            packed = DocumentParams.carry(DeclaredMask.of_rows(masks, cp, ring.split))
        elif mask == "documents":
            packed = DocumentParams.carry(Documents.in_rows(edges, rows, cp, ring.split))
        elif mask == "packed":
            both = np.append(0, np.cumsum(np.diff(spans))), edges
            packed = thd_params(
                *(torch.tensor(x, dtype=torch.int32).to(own_device()) for x in both)
            )
        return cls(
            mask, items, shape, rules, packed, documents_of(packed, (rows, n // cp), cp, ring)
        )

    def delivered(self, seed: int, number: int = 0) -> Any:
        """Return a copy of this one of `items`, because a script may write into the dictionary and
        its tensors.

        The loss mask has random factors and further zeros: equal weights would not show whose they
        are.
        """
        item = copy.deepcopy(self.items[number % len(self.items)])
        if item and isinstance(own := item.get("loss_mask"), Tensor):
            item["loss_mask"] = own * self._factors(seed).view(own.shape)
        return item

    def trained(self, seed: int, blind: bool, vocabulary: int) -> Any:
        """Return a copy of a drawn microbatch with random tokens of `vocabulary`. With `blind`,
        labels are others where the loss mask is 0.
        """
        item, random = self.delivered(seed), torch.Generator().manual_seed(seed)
        table = torch.randint(vocabulary, (int(item["labels"].max()) + 1,), generator=random)
        item["tokens"] = table[item["tokens"]]
        item["labels"] = table[item["labels"]] + blind * (item["loss_mask"] == 0)
        item["labels"] %= vocabulary
        return item

    def _factors(self, seed: int) -> Tensor:
        """Draw zeros, and weights of up to 1.75 in quarters, which become more frequent along the
        sequence: float32 [rows, n].

        The weights of a rank add up to a whole number: loss functions of Megatron's scripts cut off
        fractions of this sum, with and without context parallelism.
        """
        random = torch.Generator().manual_seed(seed)
        last = torch.stack([rule.last for rule in self.rules])
        b, n = last.shape
        some = torch.rand(b, n, generator=random) < torch.linspace(0.4, 1.0, n)
        mask = some * torch.randint(1, 8, (b, n), generator=random) / 4
        if self.mask != "causal":
            mask[last] = 0
        for rank in range(self.split.layout.cp):
            mine = self.split.places(rank).T
            part = mask.gather(1, mine)
            for batch_row, token in part.nonzero()[-1:].tolist():
                mask[batch_row, mine[batch_row, token]] += -float(part.sum(dtype=torch.float64)) % 1
        return mask


def take(iterators: Any) -> list[Any]:
    """Take one item of each of Megatron's data iterators (one, or one for each virtual stage), and
    hand it back, for training; None where a rank has no data.
    """
    items = []
    for iterator in iterators if isinstance(iterators, list) else [iterators]:
        # beneath Megatron's record of microbatches
        items.append(next(getattr(iterator, "iterable", iter(())), None))
        if items[-1] is not None:
            iterator.iterable = itertools.chain(items[-1:], iterator.iterable)
    return items


def shared_items(items: list[Any]) -> list[Any]:
    """Return the item of the first of the ranks that share a microbatch, what a whole model on this
    rank reads, and `items`; [] if there is no data. All ranks call it together if one has `items`.
    """
    own = next((each for each in items if each is not None), None)
    held = [own]
    for name in ("pp", "tp", "cp") if items else ():
        dist.broadcast_object_list(held, group=compat.group_of(None, name), group_src=0)
    (whole,) = held
    if own is None and compat.group_of(None, "tp").rank() == 0:  # which loads for the others
        own = whole
    return [whole, own, *items] if whole else []


def vocabulary_of(model: Any) -> int:
    """Return how many tokens the probes draw from: those of a program's model may be fewer."""
    return min(VOCABULARY, getattr(model, "vocab_size", VOCABULARY))


def own_device() -> torch.device:
    """Return the device of this rank, which is the current one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def worst_of(error: Tensor, places: Tensor) -> str:
    """Return where the largest of the errors [b, s, ...] of the tokens at `places` [b, s] is."""
    each = error.abs().reshape(*places.shape, -1).amax(2).nan_to_num(torch.inf)
    row, token = divmod(int(each.argmax()), places.shape[1])
    return f"token {int(places[row, token])} of batch row {row}"


TREE = (-1, 0, 1, 1, 0, -1)
"""The parents of its branches."""


def sample(kind: str, n: int, seed: int, unit: int = 1) -> Mask:
    """Return a mask of `n` tokens, at least 64, of a kind of `MASK_KINDS`. Each seed gives another
    mask. Its edges are multiples of `unit`.
    """
    random, units = np.random.default_rng(seed), n // unit
    inner = random.choice(np.arange(1, units), size=min(7, units) - 1, replace=False)
    cuts = (np.append(0, np.sort(inner)) * unit).tolist()
    lengths, edges = np.diff(cuts).tolist(), [*cuts[::2], n]
    names = {"any": "images", "global": "with_global"}
    make: Callable[..., Mask] = getattr(Mask, names.get(kind, kind.replace("-", "_")))
    match kind:
        case "causal" | "full":
            return make(n)
        case "documents":
            return make(edges)
        case "prefix":
            return make(n, np.diff(edges) // 2, edges)
        case "shared-prefix":
            return make([(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])], n)
        case "tree":
            return make(TREE, lengths, n)
        case "global":
            return make(n, [(0, 1), (cuts[3], cuts[3] + 1)], (n // 8, 0))
        case "block-causal" | "block-diffusion":
            return make(n, n // 9 + seed % 5)
    # images around a quarter and a half of the sequence, where many layouts have an edge
    size = n // 16 + seed % 5
    return make(n, [(n * i // 4 - size, n * i // 4 + size // 2) for i in (1, 2, 3)])
