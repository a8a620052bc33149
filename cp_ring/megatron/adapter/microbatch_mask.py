"""The mask of a microbatch, and the plans for it.

It reaches each layer as an argument, inside `packed_seq_params`, see `documents`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from cp_ring.megatron.adapter.notes import note
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan, PlanSpec
from cp_ring.plan.ranges import Ints
from cp_ring.plan.records import RankPlan
from cp_ring.runtime import RUNTIME

KEY = "cp_ring_mask"
"""The entry of a batch that declares its mask."""


_proven: set[tuple[Any, ...]] = RUNTIME.keep(set())


@dataclass(frozen=True, eq=False)
class MicrobatchMask:
    """The mask of a microbatch whose batch rows form one stream, and the plans for it.

    Attributes:
        whole: the mask of the stream, in layers that are not causal.
        layout: the layout of the stream; each rank holds equally many tokens of each batch row.
        batch: the number of batch rows, which have the same length.
        made: what layers share: plans, and the pieces of recurrent layers.
    """

    # the flag that messages name, and how many later keys a causal layer may see (-1: any number)
    origin = "--cp-ring-document-mask"
    later = 0
    whole: Mask
    layout: Layout
    batch: int = 1
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def row(self) -> int:
        """The tokens of a batch row."""
        return self.layout.n // self.batch

    def mask(self, window: tuple[int, int] = (-1, -1), causal: bool = True) -> Mask:
        """Return the mask of a layer with this window. A layer that is not `causal` also sees later
        tokens, if the mask allows it.
        """
        return narrowed(self.whole, (window[0], self.later if causal else window[1]))

    def positions(self, rank: int) -> torch.Tensor:
        """Return the positions, for rotary embeddings, of the tokens that `rank` holds: int64 [n /
        cp, batch]. Those of a document begin at 0: angles of small positions are more accurate.
        """
        positions = torch.from_numpy(self.whole.positions)
        return self.shard(positions, rank).transpose(0, 1)

    @property
    def longest(self) -> int:
        """The number of positions of rotary embeddings, rounded up to a power of two: Megatron
        keeps the embeddings of each number that it meets.
        """
        return min(1 << int(self.whole.positions.max()).bit_length(), self.row)

    def last(self) -> torch.Tensor:
        """Return True for tokens without a next token, the last one of each sequence and padding:
        bool [tokens of the stream].
        """
        return torch.from_numpy(self.whole.last)

    def starts(self) -> tuple[Ints, Ints]:
        """Return the tokens of the stream at which a recurrent state does not continue that of the
        token before, int64: the first tokens of batch rows, documents, branches and padding. And
        for each the token whose state it continues, -1 for none: for a branch the last earlier
        token that its first token sees.
        """
        segments = self.whole.segments
        pieces = self.whole.pieces
        starts = np.union1d(segments[0], np.arange(self.batch) * self.row)
        before = np.full_like(starts, -1)
        for start in segments[0][segments[1] > 0]:
            seen = (pieces.q0 <= start) & (start < pieces.q1) & (pieces.k1 <= start)
            before[starts == start] = pieces.k1[seen].max() - 1
        return starts, before

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
        if key not in self.made:
            kind = self.layout.name, self.layout.cp, self.whole.name, *key[1:]
            spec = replace(spec, layout=self.layout)
            self.made[key] = _make_plan(self.mask(window, causal), spec, self.layout.cp, rank, kind)
        return self.made[key]

    def places(self, rank: int) -> torch.Tensor:
        """Return the indices in their batch rows of the tokens that `rank` holds: int64 [n / cp,
        batch].
        """
        return self.shard(torch.arange(self.layout.n) % self.row, rank).transpose(0, 1)

    def shard(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part [batch, n / cp] that `rank` holds of `x`, [batch, n] or as one stream."""
        index = torch.from_numpy(self.layout.positions(rank)).to(x.device)
        return x.reshape(-1).index_select(0, index).view(self.batch, -1)


@RUNTIME.cache(maxsize=64)
def narrowed(mask: Mask, window: tuple[int, int]) -> Mask:
    """Return `mask` within `window`; the layers of a microbatch share the result."""
    return mask if max(window) < 0 else mask & window


def _make_plan(
    mask: Mask, spec: PlanSpec, cp: int, rank: int, kind: tuple[object, ...]
) -> RankPlan:
    """Return the plan of one rank, proven. The plan of all ranks is proven for the first mask of
    each `kind`, whose plans are similar.
    """
    plan = spec.build(mask, cp, rank)
    own, spec = plan.proven_part(rank), replace(spec, ulysses=plan.ulysses, choice=None)
    kind = *kind, plan.ulysses
    if kind not in _proven:
        # not cached, because the next microbatch has another mask
        whole = spec.build(mask, cp)
        whole.verify(executed=own)
        _proven.add(kind)
        _tell_gain(whole, spec)
    return own


LONG = 1024
"""The least tokens of a rank for which a line tells what the balanced layout would gain."""


def _tell_gain(plan: Plan, spec: PlanSpec) -> None:
    mask = plan.mask
    cp = plan.cp
    worker = get_worker_info()
    if (worker and worker.id) or mask.n < LONG * cp or plan.layout.name == "balanced":
        return
    balanced = replace(spec, layout=Layout.balanced(mask, cp)).build(mask, cp)
    ratio = plan.time().both / balanced.time().both
    if ratio > 1.1:
        note(
            f"attention on the first packed microbatch is predicted to take {ratio:.2f} times as "
            f"long by the layout {plan.layout.name} as by --cp-ring-layout balanced"
        )
