"""Masks of microbatches: the masks that batches declare, and the code that they share with packed
documents.

A batch may carry `cp_ring_mask` beside its tokens: a `Mask` for all of its batch rows, or a list
with one for each. The mask travels as
documents do, see `documents`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from cp_ring.errors import ConfigError
from cp_ring.megatron.options import MASK_KINDS
from cp_ring.megatron.plans import layout_of_row
from cp_ring.megatron.rejection import note
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import RankPlan
from cp_ring.runtime import RUNTIME

KEY = "cp_ring_mask"
"""The entry of a batch that declares its mask."""

_proven: set[tuple[Any, ...]] = RUNTIME.keep(set())


def collate_masks() -> None:
    """Teach torch's data loader to collate samples with masks: it makes a list of the masks."""
    default_collate_fn_map[Mask] = lambda masks, **_: list(masks)


def stop_collating_masks() -> None:
    default_collate_fn_map.pop(Mask, None)


class MicrobatchMask(ABC):
    """The mask of a microbatch whose batch rows form one stream, and the plans for it.

    Subclasses have `layout`, the layout of the stream, in which each rank holds equally many tokens
    of each batch row, and `batch`, the number of batch rows, which have the same length.
    """

    origin = "--cp-ring-document-mask"  # the flag that messages name
    layout: Layout
    batch: int
    _plans: dict[tuple[Any, ...], RankPlan]

    @abstractmethod
    def mask(self, window: tuple[int, int] = (-1, -1), causal: bool = True) -> Mask:
        """Return the mask of a layer with this window. A layer that is not `causal` also sees later
        tokens, if the mask allows it.
        """

    def positions(self, rank: int) -> torch.Tensor:
        """Return the positions, for rotary embeddings, of the tokens that `rank` holds: int64 [n /
        cp, batch].
        """
        return self.places(rank)

    @abstractmethod
    def last(self) -> torch.Tensor:
        """Return True for tokens without a next token, the last one of each sequence and padding:
        bool [tokens of the stream].
        """

    @abstractmethod
    def starts(self) -> tuple[Ints, Ints]:
        """Return the tokens of the stream at which a recurrent state does not continue that of the
        token before, int64: the first tokens of documents, branches and padding. And for each the
        token whose state it continues, -1 for none.

        The state also restarts at each batch row, which is not in this list.
        """

    def kind(self) -> str:
        """Return a name that masks with similar plans share."""
        return type(self).__name__

    def rank_plan(
        self,
        rank: int,
        window: tuple[int, int] = (-1, -1),
        causal: bool = True,
        spec: PlanSpec = PlanSpec(),
    ) -> RankPlan:
        """Return the plan of `rank`; all layers with this window share it.

        `self.layout` splits the tokens, whatever the layout in `spec`. The plan of all ranks is
        made and proven for the first mask of each kind.
        """
        key = rank, window, causal, spec
        if key not in self._plans:
            kind = self.layout.name, self.layout.cp, self.kind(), *key[1:]
            spec = replace(spec, layout=self.layout)
            self._plans[key] = _make_plan(
                self.mask(window, causal), spec, self.layout.cp, rank, kind
            )
        return self._plans[key]

    def places(self, rank: int) -> torch.Tensor:
        """Return the indices in their batch rows of the tokens that `rank` holds: int64 [n / cp,
        batch].
        """
        stream = torch.from_numpy(self.layout.positions(rank)).view(self.batch, -1)
        return (
            stream - torch.arange(self.batch)[:, None] * (self.layout.n // self.batch)
        ).transpose(0, 1)

    def shard(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part [batch, n / cp] of `x` [batch, n] that `rank` holds."""
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
    _plans: dict[tuple[Any, ...], RankPlan] = field(default_factory=dict, repr=False)

    @classmethod
    def of_rows(cls, masks: Sequence[Mask], layout: str, cp: int) -> DeclaredMask:
        """Join the masks of batch rows, which have the same length. The layout named `layout`
        splits each batch row separately.
        """
        layouts = [
            layout_of_row(layout, mask.n, cp, partial(_seen_by, mask, causal=True))
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


def _make_plan(
    mask: Mask, spec: PlanSpec, cp: int, rank: int, kind: tuple[object, ...]
) -> RankPlan:
    """Return the plan of one rank, proven. The plan of all ranks is proven for the first mask of
    each `kind`, whose plans are similar.
    """
    spec = spec.settled(mask, cp)
    kind = (*kind, spec.ulysses)
    own = spec.build_rank_plan(mask, cp, rank)
    if kind not in _proven:
        # not cached, because the next microbatch has another mask
        whole = spec.build(mask, cp)
        whole.verify(executed=own)
        _proven.add(kind)
        worker = get_worker_info()
        first = worker is None or worker.id == 0
        if first and mask.n >= LONG * cp and whole.layout.name != "balanced":
            _tell_gain(whole, spec)
    return own


LONG = 1024
"""The least tokens of a rank for which a line tells what the balanced layout would gain."""


def _tell_gain(plan: Plan, spec: PlanSpec) -> None:
    mask, cp = plan.mask, plan.cp
    balanced = replace(spec, layout=Layout.balanced(mask, cp)).build(mask, cp)
    ratio = plan.time().both / balanced.time().both
    if ratio > 1.1:
        note(
            f"attention on the first packed microbatch is predicted to take {ratio:.2f} times as "
            f"long by the layout {plan.layout.name} as by --cp-ring-layout balanced"
        )
