"""Merges, sums and kernel calls of one rank by its plan: how many, and the bytes that they read and
write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cp_ring.plan.lower import Capabilities, call_groups, lower
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.tables import Hop, RankPlan
from cp_ring.plan.tiles import Tiles
from cp_ring.plan.updates import Partial, Update, gradient_updates, query_updates


@dataclass(frozen=True)
class RankUpdates:
    """The updates of one rank's totals (`cp_ring.plan.updates`): of out, of dq, and of dk and dv of
    each hop, by its index. grids: the tiles of its kernel calls in forward and in backward.
    """

    out: tuple[Update, ...]
    dq: tuple[Update, ...]
    keys: Mapping[int, tuple[Update, ...]]
    grids: tuple[list[Tiles], list[Tiles]]

    @property
    def calls(self) -> int:
        """Kernel calls in forward."""
        return len(self.grids[0])


def rank_updates(rank_plan: RankPlan, kernel: Capabilities) -> RankUpdates:
    """What the executor runs with such a kernel."""
    forward, backward = (
        [_calls(hop, kernel) for hop in hops] for hops in (rank_plan.hops, rank_plan.backward)
    )
    out, dq = (
        query_updates(([part for part, *_ in calls] for calls in hops), rank_plan.num_tokens)
        for hops in (forward, backward)
    )
    keys = gradient_updates(
        rank_plan.backward,
        [[part for _, part, _ in calls] for calls in backward],
        rank_plan.num_tokens,
    )
    of_calls = [[tiles for hop in hops for *_, tiles in hop] for hops in (forward, backward)]
    return RankUpdates(out, dq, keys, (of_calls[0], of_calls[1]))


def _calls(hop: Hop, kernel: Capabilities) -> list[tuple[Partial, Partial, Tiles]]:
    """Where the queries and the keys of a hop's kernel calls belong, and the tiles of each."""
    lowered = lower(hop.tiles, kernel)
    tiles, shift, reverse = (
        list(lowered.tiles),
        hop.grad_shift[lowered.parent].tolist(),
        lowered.reverse.tolist(),
    )
    return [
        (
            Partial.of([(tiles[i].q0, tiles[i].q1) for i in group], reverse=reverse[group[0]]),
            Partial.of(
                [(tiles[i].k0 + shift[i], tiles[i].k1 + shift[i]) for i in group],
                reverse=reverse[group[0]],
            ),
            lowered.tiles[np.array(group)],
        )
        for group in call_groups(lowered, kernel.varlen)
    ]


def accumulator_bytes(
    updates: RankUpdates, sizes: AttentionSizes, lse_element: int = 4
) -> tuple[int, int]:
    """Bytes that merges, sums, casts and zero fills of one rank read and write: (forward,
    backward).

    The kernel returns partial results in the dtype of the inputs, as on CUDA. `lse_element` is that
    of the running lse.
    """
    element, wire = sizes.element, sizes.wire_element
    lse = sum(
        sum(update.read) * 4 + sum(update.stored) * lse_element
        for update in updates.out
        if not update.whole
    )
    forward = (
        sum(_accumulated(update, element, wire, element) for update in updates.out)
        * sizes.out_width
    )
    backward = (
        sum(_accumulated(update, element, wire, element) for update in updates.dq)
        * sizes.query_width
    )
    for index, of_hop in updates.keys.items():
        result = wire if index else element
        backward += (
            sum(_accumulated(update, element, wire, result) for update in of_hop) * sizes.key_width
        )
    return forward + lse * sizes.batch * sizes.heads, backward


def _accumulated(update: Update, part: int, wire: int, result: int) -> int:
    """Bytes of an update for each element of a token, with elements of these sizes."""
    if update.whole and part == result:
        return 0
    computed, arrived = update.read
    loaded, kept, completed = update.stored
    return computed * part + arrived * wire + (loaded + kept) * 4 + completed * result
