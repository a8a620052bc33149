"""Merges, sums and kernel calls of one rank: how many, the bytes that they read and write, and
how well the calls fill the processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.costs.waves import REFERENCE, Grids, share, square
from cp_ring.plan.lower import BLOCK, Capabilities, call_groups, lower
from cp_ring.plan.ranges import Ints
from cp_ring.plan.rank_plan import rank_tiles
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates
from cp_ring.plan.tables import Hop, PlanTables, RankPlan
from cp_ring.plan.tiles import Tiles
from cp_ring.plan.updates import Partial, Update, gradient_updates, query_updates

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankUpdates:
    """The updates of one rank's totals (`cp_ring.plan.updates`): of out, of dq, and of dk and dv of
    each hop, by its index.

    grids: the tiles of its kernel calls. overlapping: these run on `Rates.streams`, else on one.
    """

    out: tuple[Update, ...]
    dq: tuple[Update, ...]
    keys: Mapping[int, tuple[Update, ...]]
    grids: Grids = ((), ())
    overlapping: bool = False

    @property
    def calls(self) -> int:
        """Kernel calls in forward."""
        return len(self.grids[0])

    def streams(self, rates: Rates) -> tuple[int, int]:
        """On how many its calls run in forward and in backward."""
        count = rates.streams if self.overlapping else 1
        return count, count if rates.urgent else 1

    def slower(
        self, sizes: AttentionSizes, groups: int, rates: Rates, *, whole: bool = False
    ) -> Floats:
        """The time of its kernel calls in forward and in backward, [2], relative to that at the
        speed of `REFERENCE`; 1 where no calls or processors are counted.

        sizes: of all heads of a rank, which take `groups` calls. whole: no processor is ever
        without a block, and no call is too short.
        """
        if not rates.processors or not self.calls:
            return np.ones(2)
        side, of_it = REFERENCE
        known = share([square(side)], of_it, processors=rates.processors)
        heads = sizes.batch * sizes.heads
        times = []
        for which, calls in enumerate(self.grids):
            product = sizes.pair_flops[which] / heads * BLOCK**2  # of one head
            least = rates.call * rates.flops / known / rates.processors / product
            of_calls = (heads // groups, bool(which))
            waves = () if whole else (rates.processors, least, self.streams(rates)[which])
            filled = share(calls, *of_calls, *waves)
            times.append(known / filled)
        return np.array(times)


NO_UPDATES = {0: RankUpdates((), (), {})}
"""For times without merges, sums and kernel calls."""


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
        rank_plan.num_keys,
    )
    of_calls = [[tiles for hop in hops for *_, tiles in hop] for hops in (forward, backward)]
    overlapping = kernel.concurrent and not rank_plan.forwards
    return RankUpdates(out, dq, keys, (of_calls[0], of_calls[1]), overlapping)


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


def kernel_calls(plan: PlanTables, kernel: Capabilities) -> Ints:
    """Kernel calls of each rank in forward: int64 [cp]."""
    of_ranks = (
        lower(tiles, kernel, hop)
        for tiles, hop in (rank_tiles(plan, rank) for rank in range(plan.cp))
    )
    return np.array([len(call_groups(lowered, kernel.varlen)) for lowered in of_ranks])


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
