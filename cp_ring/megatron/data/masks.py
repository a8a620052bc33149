"""Masks of microbatches: those that batches declare, and what they have in common with packed
documents.

A batch may carry `cp_ring_mask` beside its tokens: a `Mask` for all of its batch rows, or a list
with one for each. A data loader's worker may send `mask.to_dict()` instead. The mask travels as
documents do, see `documents`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from cp_ring.errors import ConfigError, PlanError
from cp_ring.megatron.data.prefetch import worker
from cp_ring.megatron.options import MASK_KINDS
from cp_ring.megatron.plans import layout_of_row
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import PlanSpec
from cp_ring.plan.ranges import Ints
from cp_ring.plan.tables import RankPlan
from cp_ring.runtime import RUNTIME

KEY = "cp_ring_mask"
"""The entry of a batch that declares its mask."""

PROVE_EVERY = 256
"""After the first plan of each kind, one in this many plans is proven."""

_made = RUNTIME.of_process(itertools.count())
_proven: set[tuple[Any, ...]] = RUNTIME.keep(set())


def collate_masks() -> None:
    """From now on torch's data loader makes a batch of samples with masks, as a list."""
    default_collate_fn_map[Mask] = lambda masks, **_: list(masks)


def stop_collating_masks() -> None:
    default_collate_fn_map.pop(Mask, None)


class MicrobatchMask(ABC):
    """Who sees whom in a microbatch, whose batch rows are one stream, one after the other; and the
    plans for it.

    Subclasses have `layout`, the layout of the stream, in which each rank holds the same number of
    tokens of each batch row, and `batch`, the number of batch rows, which have the same length.
    """

    origin = "--cp-ring-document-mask"  # where it comes from, for messages
    layout: Layout
    batch: int
    _plans: dict[tuple[Any, ...], Future[RankPlan]]

    @abstractmethod
    def mask(self, window: tuple[int, int] = (-1, -1), causal: bool = True) -> Mask:
        """The mask of a layer with this window; a layer that is not `causal` also sees later
        tokens, where the mask allows it.
        """

    def positions(self, rank: int) -> torch.Tensor:
        """The positions, for rotary embeddings, of the tokens that `rank` holds: int64 [n / cp,
        batch].
        """
        return self.places(rank)

    @abstractmethod
    def last(self) -> torch.Tensor:
        """True for the last token of each sequence and for padding, which have no next token: bool
        [tokens of the stream].
        """

    @abstractmethod
    def starts(self) -> Ints:
        """Where a state that runs along the stream begins anew: the first tokens of documents and
        of padding, int64.

        Batch rows begin anew without being among them.
        """

    def kind(self) -> str:
        """A name for masks whose plans are alike."""
        return type(self).__name__

    def prepare(
        self,
        rank: int,
        window: tuple[int, int] = (-1, -1),
        causal: bool = True,
        spec: PlanSpec = PlanSpec(),
    ) -> Future[RankPlan]:
        """Starts making the rank plan of `rank` on a worker thread, once for all layers with this
        window.

        Tokens are split as `self.layout` says, whatever the layout of `spec`. The plan of all ranks
        is made and proven for the first mask of each kind, and then for one in `PROVE_EVERY` masks.
        """
        key = rank, window, causal, spec
        if key not in self._plans:
            kind = self.layout.name, self.layout.cp, self.kind(), *key[1:]
            spec = replace(spec, layout=self.layout)
            self._plans[key] = worker().submit(
                _make_plan, self.mask(window, causal), spec, self.layout.cp, rank, kind
            )
        return self._plans[key]

    def places(self, rank: int) -> torch.Tensor:
        """Where the tokens that `rank` holds are in their batch rows: int64 [n / cp, batch]."""
        stream = torch.from_numpy(self.layout.positions(rank)).view(self.batch, -1)
        return (
            stream - torch.arange(self.batch)[:, None] * (self.layout.n // self.batch)
        ).transpose(0, 1)

    def shard(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The part [batch, n / cp] that `rank` holds of `x` [batch, n]."""
        index = torch.from_numpy(self.layout.positions(rank)).to(x.device)
        return x.reshape(-1).index_select(0, index).view(self.batch, -1)


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
    _plans: dict[tuple[Any, ...], Future[RankPlan]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_rows(cls, masks: Sequence[Mask], layout: str, cp: int) -> DeclaredMask:
        """The masks of batch rows, which have the same length. The layout named `layout` splits
        each batch row separately.
        """
        layouts = [
            layout_of_row(layout, mask.n, cp, partial(_seen_by, mask, causal=True))
            for mask in masks
        ]
        if len(masks) == 1:
            return cls(masks[0], layouts[0])
        return cls(Mask.batch(masks), Layout.batch(layouts), len(masks))

    def mask(self, window: tuple[int, int] = (-1, -1), causal: bool = True) -> Mask:
        """The declared mask within a layer's window. A causal layer's window limits earlier keys
        only.
        """
        return _seen_by(self.whole, window, causal)

    def positions(self, rank: int) -> torch.Tensor:
        positions = torch.from_numpy(self.whole.positions[self.layout.positions(rank)])
        return positions.view(self.batch, -1).transpose(0, 1)

    @property
    def own_positions(self) -> bool:
        """Whether a batch row has other positions than the places of its tokens."""
        starts = np.arange(self.batch) * (self.layout.n // self.batch)
        segments = self.whole.segments
        return segments is not None and not (
            np.array_equal(segments[0], starts) and not segments[1].any()
        )

    def last(self) -> torch.Tensor:
        return torch.from_numpy(self.whole.last)

    def starts(self) -> Ints:
        """Raises `ConfigError` for branches, which go on with the state of an earlier token."""
        segments = self.whole.segments
        if segments is None:
            return np.zeros(0, np.int64)
        if (at := segments[:, segments[1] > 0]).size:
            raise ConfigError(
                f"the mask {self.whole.name} has a branch at token {at[0, 0]}, which begins at "
                f"position {at[1, 0]}: the state of recurrent layers runs along the sequence and "
                "has no branches; make sequences of their own of them, as Mask.documents has them"
            )
        return segments[0]

    def kind(self) -> str:
        return self.whole.name


def read(entry: Any, batch: int, n: int, kinds: Sequence[str]) -> list[Mask]:
    """The masks of `batch` batch rows of `n` tokens, from the entry `KEY` of a batch; None is
    causal.

    Raises `ConfigError` for what is not a mask of `n` tokens, or not of the `kinds` that the job
    declares.
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
        if mask.segments is not None and int(mask.positions.max()) >= n:
            raise ConfigError(
                f"{KEY} has positions up to {mask.positions.max()}, past the {n} tokens of a batch "
                "row"
            )
    return masks


def _mask(entry: Any) -> Mask:
    if isinstance(entry, Mask):
        return entry
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{KEY} is a {type(entry).__name__}, not a Mask, what Mask.to_dict returns, or a list "
            "of these"
        )
    try:
        return Mask.from_dict(entry)
    except PlanError as error:
        raise ConfigError(f"{KEY}: {error}") from None


@RUNTIME.cache(maxsize=64)
def _seen_by(mask: Mask, window: tuple[int, int], causal: bool) -> Mask:
    left, right = window[0], -1 if causal else window[1]
    return mask if left < 0 and right < 0 else mask & (left, right)


def _make_plan(
    mask: Mask, spec: PlanSpec, cp: int, rank: int, kind: tuple[object, ...]
) -> RankPlan:
    """The plan of one rank; that of all ranks is made and proven now and then, with this part in
    it. Plans of one `kind` are alike.
    """
    spec = spec.settled(mask, cp)
    kind = (*kind, spec.ulysses)
    own = spec.build_rank_plan(mask, cp, rank)
    if kind not in _proven or next(_made) % PROVE_EVERY == 0:
        # not kept: the next microbatch has another mask
        spec.build(mask, cp).verify(executed=own)
        _proven.add(kind)
    return own
