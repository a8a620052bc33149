"""Merges, sums and kernel calls of one rank by its plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cp_ring.plan.lower import call_groups, lower
from cp_ring.plan.updates import Partial, gradient_updates, query_updates


@dataclass(frozen=True)
class RankUpdates:
    """The updates of one rank's totals (`cp_ring.plan.updates`): of out, of dq, and of dk and dv of
    each hop, by its index. grids: the tiles of its kernel calls in forward and in backward.
    """

    out: tuple
    dq: tuple
    keys: Mapping
    grids: tuple


def rank_updates(rank_plan, kernel):
    """What the executor runs with such a kernel."""
    forward, backward = (
        [_calls(hop, kernel) for hop in hops] for hops in (rank_plan.hops, rank_plan.backward)
    )
    out, dq = (
        query_updates(
            ([part for part, *_ in calls] for calls in hops), rank_plan.num_tokens, hops is backward
        )
        for hops in (forward, backward)
    )
    keys = gradient_updates(
        rank_plan.backward,
        [[part for _, part, _ in calls] for calls in backward],
        rank_plan.num_tokens,
    )
    of_calls = [[tiles for hop in hops for *_, tiles in hop] for hops in (forward, backward)]
    return RankUpdates(out, dq, keys, (of_calls[0], of_calls[1]))


def _calls(hop, kernel):
    """Where the queries and the keys of a hop's kernel calls belong, and the tiles of each."""
    lowered = lower(hop.tiles, kernel)
    tiles, shift, reverse = (
        list(lowered.tiles),
        hop.grad_shift[lowered.parent].tolist(),
        lowered.reverse.tolist(),
    )
    found = []
    for sequences in call_groups(lowered, kernel.varlen):
        group, back = [i for sequence in sequences for i in sequence], reverse[sequences[0][0]]
        queries = [(tiles[i].q0, tiles[i].q1) for i, *_ in sequences]
        keys = [(tiles[i].k0 + shift[i], tiles[i].k1 + shift[i]) for i in group]
        parts = (Partial.of(spans, reverse=back) for spans in (queries, keys))
        found.append((*parts, lowered.tiles[np.array(group)]))
    return found
