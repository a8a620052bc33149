"""The proof of what ranks exchange for recurrent layers (`Segments`). It shares no code with what
makes these plans.
"""

from __future__ import annotations

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints
from cp_ring.recurrent.segments import Segments, Swap


def verify(segments: Segments, width: int) -> None:
    """Plays all ranks, with positions in place of tokens and ranges of positions in place of maps:
    each segment must get the state of its document up to the token before it, and the `width - 1`
    tokens before it. The gradients of the states after it must come from all later segments of its
    document. Raises `PlanError`.

    width: of the causal convolution that runs, its own token among them.
    """
    layout, starts = segments.layout, segments.starts
    ranks = range(layout.cp)
    plans, halos = [segments.held(r) for r in ranks], [segments.halo(r, width) for r in ranks]
    tokens = [layout.positions(rank) for rank in ranks]
    begun = starts[np.searchsorted(starts, np.arange(layout.n), "right") - 1]
    arrived = _played([halo.swap for halo in halos], tokens, [x.swap.target for x in halos])
    for rank, (plan, halo) in enumerate(zip(plans, halos, strict=True)):
        whole = np.append(tokens[rank], arrived[rank])[halo.order]
        parts = np.split(tokens[rank], plan.offsets[1:-1])
        for part, wide in zip(parts, np.split(whole, halo.offsets[1:-1]), strict=True):
            wanted = np.arange(max(begun[part[0]], part[0] - width + 1), part[-1] + 1)
            inside = (begun[part] != begun[part[0]]).any() or (np.diff(part) != 1).any()
            if inside or not np.array_equal(wide, wanted):
                raise PlanError(f"rank {rank}: the tokens {wide} are not {wanted}, a segment")
        if not np.array_equal(whole[halo.own], tokens[rank]):
            raise PlanError(f"rank {rank}: outputs of a convolution are in other places")
    # the first token of each segment, and the one after its last
    spans = [
        np.stack([held[plan.offsets[:-1]], held[plan.offsets[1:] - 1] + 1], 1)
        for held, plan in zip(tokens, plans, strict=True)
    ]
    both = list(zip(spans, plans, strict=True))
    gathered = _played_gather(segments, False, [span[plan.hands_on] for span, plan in both])
    returned = _played_gather(segments, True, [span[plan.goes_on] for span, plan in both])
    edges = np.append(starts, layout.n)
    for rank, (span, plan) in enumerate(both):
        place = np.searchsorted(starts, span[:, 0], "right")
        wanted = np.stack([edges[place - 1], span[:, 0]], 1)
        later = np.stack([span[:, 1], edges[place]], 1)
        _compare(rank, "states of a gather", plan.goes_on, gathered[rank], wanted)
        _compare(rank, "gradients", plan.hands_on, returned[rank], later)


def _played_gather(segments: Segments, back: bool, given: list[Ints]) -> list[Ints]:
    """The tokens (first, one past the last) of which the composed maps are that each rank ends
    with, from those of the maps that it gives.
    """
    plans = [segments.gather(rank, back) for rank in range(segments.layout.cp)]
    tables = [np.full((len(plan.swap.target), 2), -1) for plan in plans]
    tables = _played([plan.swap for plan in plans], given, tables)
    near, far = (0, 1) if back else (1, 0)
    for rank, plan in enumerate(plans):
        for entries, others in plan.walk:
            if (tables[rank][entries, near ^ 1] != tables[rank][others, near]).any():
                raise PlanError(f"rank {rank}: maps that do not follow each other: {entries}")
            tables[rank][entries, far] = tables[rank][others, far]
    return [table[plan.ends] for table, plan in zip(tables, plans, strict=True)]


def _compare(rank: int, what: str, places: Ints, found: Ints, wanted: Ints) -> None:
    """Raises `PlanError` unless the ranges `found` at `places` are all of `wanted` that are not
    empty.
    """
    some = np.flatnonzero(wanted[:, 0] != wanted[:, 1])
    if not np.array_equal(some, places) or not np.array_equal(found, wanted[some]):
        raise PlanError(f"rank {rank}: {what} of the tokens {found.tolist()}, not {wanted[some]}")


def _played(swaps: list[Swap], held: list[Ints], before: list[Ints]) -> list[Ints]:
    """What each rank has after the swap: `before`, with what has arrived."""
    parts = [np.split(held[r][x.source], np.cumsum(x.leaving)[:-1]) for r, x in enumerate(swaps)]
    outs = [x.copy() for x in before]
    for rank, swap in enumerate(swaps):
        come = [of_peer[rank] for of_peer in parts]
        if [len(part) for part in come] != swap.arriving.tolist():
            raise PlanError(f"rank {rank} awaits {swap.arriving}, but others send {come}")
        outs[rank][swap.target] = np.concatenate(come)
    return outs
