"""Masks of microbatches: the masks that batches declare, and the code that they share with packed
documents.

A batch may carry `cp_ring_mask` beside its tokens: a `Mask` for all of its batch rows, or a list
with one for each. The mask travels as
documents do, see `documents`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import EVERY_KEY, LayerWindows
from cp_ring.megatron.adapter.microbatch_mask import KEY, MicrobatchMask
from cp_ring.megatron.adapter.plans import layout_of_row
from cp_ring.megatron.options import MASK_KINDS
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import RankPlan
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True, eq=False)
class DeclaredMask(MicrobatchMask):
    """The mask that a batch declares.

    Attributes:
        whole: the mask of the stream of all batch rows.
        layout: the layout of the stream.
        batch: the number of batch rows.
    """

    origin = KEY
    whole: Mask
    layout: Layout
    batch: int = 1
    _plans: dict[tuple[Any, ...], RankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def of_rows(
        cls, masks: Sequence[Mask], layout: str, cp: int, windows: LayerWindows = EVERY_KEY
    ) -> DeclaredMask:
        """Join the masks of batch rows, which have the same length. The layout named `layout`
        splits each batch row separately.
        """
        layouts = [
            layout_of_row(layout, mask.n, cp, partial(_seen_by, mask, causal=True), windows)
            for mask in masks
        ]
        if len(masks) == 1:
            return cls(masks[0], layouts[0])
        return cls(Mask.batch(masks), Layout.batch(layouts), len(masks))

    def mask(self, window: tuple[int, int] = (-1, -1), causal: bool = True) -> Mask:
        """Return the declared mask within a layer's window. A causal layer's window limits earlier
        keys only.
        """
        return _seen_by(self.whole, window, causal)

    def positions(self, rank: int) -> torch.Tensor:
        positions = torch.from_numpy(self.whole.positions[self.layout.positions(rank)])
        return positions.view(self.batch, -1).transpose(0, 1)

    @property
    def own_positions(self) -> bool:
        """Return True if a token's position in some batch row differs from its index."""
        starts = np.arange(self.batch) * (self.layout.n // self.batch)
        first, position = self.whole.segments
        return not np.array_equal(first, starts) or bool(position.any())

    def last(self) -> torch.Tensor:
        return torch.from_numpy(self.whole.last)

    def starts(self) -> tuple[Ints, Ints]:
        """Return the starts of sequences and branches; a branch continues the state of the last
        earlier token that its first token sees.
        """
        segments, pieces = self.whole.segments, self.whole.pieces
        starts, before = segments[0], np.full_like(segments[0], -1)
        for i in np.flatnonzero(segments[1]):
            seen = (pieces.q0 <= starts[i]) & (starts[i] < pieces.q1) & (pieces.k1 <= starts[i])
            before[i] = pieces.k1[seen].max() - 1
        return starts, before

    def kind(self) -> str:
        return self.whole.name


def read(entry: Any, batch: int, n: int, kinds: Sequence[str]) -> list[Mask]:
    """Return the masks of `batch` batch rows of `n` tokens from the entry `KEY` of a batch; None
    means causal.

    Raises `ConfigError` for an entry that is not a mask of `n` tokens, or whose kind is not among
    `kinds`, which the job declares.
    """
    if entry is None:
        return [Mask.causal(n)] * batch
    several = entry if isinstance(entry, list | tuple) else [entry] * batch
    if len(several) != batch:
        raise ConfigError(
            f"{KEY} holds {len(several)} masks for {batch} batch rows: give one for each, or one "
            "for all"
        )
    masks = [_mask(each) for each in several]
    for mask in masks:
        if mask.n != n:
            raise ConfigError(f"{KEY} is for {mask.n} tokens, but a batch row has {n}")
        name = mask.name.replace("_", "-")
        if name not in kinds and "any" not in kinds:
            raise ConfigError(
                f"{KEY} is a mask of the kind {name}, which the certificate has not probed: add "
                f"{name if name in MASK_KINDS else 'any'} to --cp-ring-mask-kinds {','.join(kinds)}"
            )
        if int(mask.positions.max()) >= n:
            raise ConfigError(
                f"{KEY} has positions up to {mask.positions.max()}, past the {n} tokens of a batch "
                "row"
            )
    return masks


def _mask(entry: Any) -> Mask:
    if not isinstance(entry, Mask):
        raise ConfigError(f"{KEY} is a {type(entry).__name__}, not a Mask, or a list of them")
    return entry


@RUNTIME.cache(maxsize=64)
def _seen_by(mask: Mask, window: tuple[int, int], causal: bool) -> Mask:
    left, right = window[0], -1 if causal else window[1]
    return mask if left < 0 and right < 0 else mask & (left, right)
