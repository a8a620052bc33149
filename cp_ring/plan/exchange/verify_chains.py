"""The proof of how states of recurrent layers pass from rank to rank (`Chains`). It shares no code
with what makes these plans.
"""

from __future__ import annotations

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.exchange.chains import Chains, Steps, Swap
from cp_ring.plan.ranges import Ints


def verify_chains(chains: Chains, width: int) -> None:
    """Plays all ranks, with positions in place of tokens and ranges of positions in place of
    states and maps: each segment must get the state of its document, or the branch that it
    continues, up to the token before it, and those of `width - 1` tokens before it. The
    gradients of the states after it must come from all later segments of its document. Raises
    `PlanError`.

    width: of the causal convolution that runs, its own token among them.
    """
    cp = chains.layout.cp
    ranks, halos = [chains.steps(r) for r in range(cp)], [chains.halo(r, width) for r in range(cp)]
    held = [chains.layout.positions(rank) for rank in range(cp)]
    # the token before each; then where the state of each has begun
    before = np.arange(chains.layout.n) - 1
    before[chains.starts] = -1
    before[chains.forks[0]] = chains.forks[1]
    anew = np.where(before < 0, np.arange(chains.layout.n), before)
    while not np.array_equal(anew, further := anew[anew]):
        anew = further
    arrived = _played([halo.swap for halo in halos], held, [halo.swap.target for halo in halos])
    for rank, (plan, halo) in enumerate(zip(ranks, halos, strict=True)):
        whole = np.append(held[rank], arrived[rank])[halo.order]
        parts = np.split(held[rank], plan.offsets[1:-1])
        for part, wide in zip(parts, np.split(whole, halo.offsets[1:-1]), strict=True):
            near = [part[0]]
            while len(near) < width and before[near[0]] >= 0:
                near.insert(0, before[near[0]])
            wanted = np.append(near[:-1], part)
            inside = (before[part[1:]] != part[:-1]).any()
            if inside or not np.array_equal(wide, wanted):
                raise PlanError(f"rank {rank}: the tokens {wide} are not {wanted}, a segment")
        if not np.array_equal(whole[halo.own], held[rank]):
            raise PlanError(f"rank {rank}: outputs of a convolution are in other places")
    # (where it began, the next token) of each state; -1 is none
    last = [x[plan.offsets[1:] - 1] for x, plan in zip(held, ranks, strict=True)]
    first = [x[plan.offsets[:-1]] for x, plan in zip(held, ranks, strict=True)]
    states = [np.full((plan.gets.max(initial=-1) + 1, 2), -1) for plan in ranks]
    outs = [np.full((len(plan.hands_on), 2), -1) for plan in ranks]
    for rank, plan in enumerate(ranks):
        begins = ~np.isin(plan.hands_on, plan.goes_on)
        segments = plan.hands_on[begins]
        outs[rank][begins] = np.stack([first[rank][segments], last[rank][segments] + 1], 1)
    for step in zip(*(plan.steps for plan in ranks), strict=True):
        states = _played([swap for swap, _, _ in step], outs, states)
        for rank, (_, into, out) in enumerate(step):
            plan = ranks[rank]
            entry = np.searchsorted(plan.goes_on, plan.hands_on[out])
            if not np.array_equal(plan.gets[entry], into):
                raise PlanError(f"rank {rank}: states {into} are not those that it hands on")
            outs[rank][out] = np.stack(
                [states[rank][into, 0], last[rank][plan.hands_on[out]] + 1], 1
            )
    for rank, plan in enumerate(ranks):
        wanted = np.stack([anew[first[rank]], before[first[rank]] + 1], 1)
        wanted[before[first[rank]] < 0] = 0
        _compare(rank, "states", plan.goes_on, states[rank][plan.gets], wanted)
    if not chains.forks.size:
        _verify_gather(chains, ranks, first, last)


def _verify_gather(chains: Chains, ranks: list[Steps], first: list[Ints], last: list[Ints]) -> None:
    """Of segments without forks, from their `first` to their `last` tokens."""
    spans = [np.stack([x, y + 1], 1) for x, y in zip(first, last, strict=True)]
    gathered = _played_gather(
        chains, False, [x[p.hands_on] for x, p in zip(spans, ranks, strict=True)]
    )
    returned = _played_gather(
        chains, True, [x[p.goes_on] for x, p in zip(spans, ranks, strict=True)]
    )
    doubled = {
        back: _played_doublings(
            chains, back, [x[places] for x, places in zip(spans, own, strict=True)]
        )
        for back, own in ((False, [p.hands_on for p in ranks]), (True, [p.goes_on for p in ranks]))
    }
    edges = np.append(chains.starts, chains.layout.n)
    for rank, plan in enumerate(ranks):
        place = np.searchsorted(chains.starts, first[rank], "right")
        wanted = np.stack([edges[place - 1], first[rank]], 1)
        later = np.stack([last[rank] + 1, edges[place]], 1)
        _compare(rank, "states of a gather", plan.goes_on, gathered[rank], wanted)
        _compare(rank, "gradients", plan.hands_on, returned[rank], later)
        _compare(rank, "states of doublings", plan.goes_on, doubled[False][rank], wanted)
        _compare(rank, "gradients of doublings", plan.hands_on, doubled[True][rank], later)


def _played_doublings(chains: Chains, back: bool, first: list[Ints]) -> list[Ints]:
    """As `_played_gather`."""
    plans = [chains.doublings(rank, back) for rank in range(chains.layout.cp)]
    tables = [np.full((len(swaps[0].target), 2), -1) for swaps in plans]
    near, far = (0, 1) if back else (1, 0)
    for step, swaps in enumerate(zip(*plans, strict=True)):
        come = _played(
            list(swaps), tables if step else first, [np.full_like(x, -1) for x in tables]
        )
        for rank, swap in enumerate(swaps):
            table, arrived = tables[rank], come[rank][swap.target]
            if not step:
                table[swap.target] = arrived
            elif (table[swap.target, far] != arrived[:, near]).any():
                raise PlanError(f"rank {rank}: maps that do not follow each other: {swap.target}")
            table[swap.target, far] = arrived[:, far]
    return tables


def _played_gather(chains: Chains, back: bool, first: list[Ints]) -> list[Ints]:
    """The tokens (first, one past the last) of which the composed maps are that each rank ends
    with, from those of the maps that it gives.
    """
    plans = [chains.gather(rank, back) for rank in range(chains.layout.cp)]
    tables = [np.full((sum(len(x.target) for x in p.swaps), 2), -1) for p in plans]
    for wave in zip(*(p.swaps for p in plans), strict=True):
        tables = _played(list(wave), first, tables)
    near, far = (0, 1) if back else (1, 0)
    for rank, plan in enumerate(plans):
        for entries, others in plan.walk:
            if (tables[rank][entries, near ^ 1] != tables[rank][others, near]).any():
                raise PlanError(f"rank {rank}: maps that do not follow each other: {entries}")
            tables[rank][entries, far] = tables[rank][others, far]
    return [table[plan.ends] for table, plan in zip(tables, plans, strict=True)]


def _compare(rank: int, what: str, places: Ints, tokens: Ints, wanted: Ints) -> None:
    """Raises `PlanError` unless the ranges `found` at `places` are all of `wanted` that are not
    empty.
    """
    some = np.flatnonzero(wanted[:, 0] != wanted[:, 1])
    if not np.array_equal(some, places) or not np.array_equal(tokens, wanted[some]):
        raise PlanError(f"rank {rank}: {what} of the tokens {tokens.tolist()}, not {wanted[some]}")


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
