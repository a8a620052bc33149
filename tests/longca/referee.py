"""The model of time that cp_ring had before its one formula, for plans of today: it counts how well
the blocks of each kernel call fill the processors of a device, and the bytes of merges and sums.

A pass of a rank is a series of stages, as in `cp_ring.plan.time`. A call is a grid of blocks, one
for each head and 128 queries, in backward 128 keys; what merges read and write comes beside. Merges
and calls are counted on the ranks of `counted_ranks`, and others are taken to be as the slowest of
these.
"""

import numpy as np

from cp_ring.kernels.work import kernel_calls
from cp_ring.plan.lower import ASSUMED, BLOCK, call_groups, lower
from cp_ring.plan.plan import Plan
from cp_ring.plan.ranges import expand
from cp_ring.plan.report import report
from cp_ring.plan.sizes.device_rates import RATES
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.tiles import OPEN, Tiles
from cp_ring.plan.updates import gradient_updates, query_updates
from tests.longca.masks import counted_ranks

PROCESSORS, BEGIN = 132, 1


def seconds(plan, sizes, node=8):
    """Forward, and forward and backward, of one kernel call divided evenly, and of the plan on its
    slowest rank.
    """
    ideal, forward, backward = _passes(plan, sizes, node)
    if plan.ring.of_backward:
        other = Plan(plan.ring.of_backward, plan.layout, plan.ulysses)
        *_, backward = _passes(other, sizes, node)
    both = forward + backward
    return float(ideal[0]), float(ideal.sum()), float(forward.max()), float(both.max())


def _passes(plan, sizes, node):
    """Of one kernel call divided evenly, in forward and backward, and of each member of the ring."""
    ring, heads, own = plan.ring, plan.ulysses, sizes.of_rank(plan.ulysses)
    groups = split_heads(sizes.heads, sizes.kv_heads, heads).groups if heads > 1 else 1
    hops, cp = ring.schedule[-1] + 1, ring.cp
    sampled = counted_ranks(cp, plan.layout.cp)
    calls = {rank: _calls(plan.rank_plan(rank * heads)) for rank in sampled}
    slower, extra = (
        _of_all({rank: count(of, own, groups) for rank, of in calls.items()}, cp)
        for count in (_slower, _merges)
    )
    work = report(ring).work[:, :hops]
    there, back = (
        work * flops / RATES.forward * slower[:, which, None]
        for which, flops in enumerate(own.pair_flops)
    )
    keys, gradients = (
        _amounts(table, size, max(1, node // heads), (cp, hops))
        for table, size in zip((ring.transfers, ring.gradients), own.on_wire(), strict=True)
    )
    live = (work > 0) | (keys.sum(0) + gradients.sum(0) > 0)
    live[:, 0] = True
    order = np.argsort(~live, 1, kind="stable")
    there, back = (np.take_along_axis(table, order, 1) for table in (there, back))
    keys, gradients = (np.take_along_axis(x, order[None], 2) for x in (keys, gradients))
    none = np.zeros((4, cp, 1))
    moving = np.concatenate([keys[..., 1:], none], 2)
    both = np.concatenate([moving, none], 2) + np.concatenate([none, gradients], 2)
    back = np.concatenate([back, none[0]], 1)
    back[:, 0] /= 2
    back[np.arange(cp), live.sum(1)] += back[:, 0]
    stages = [
        np.maximum(there, _link(moving)).sum(1),
        np.maximum(back, _link(both)).sum(1),
    ]
    size = int(plan.layout.tokens_per_rank.max()) * own.element * (heads - 1)
    exchange = size * (own.query_width + own.key_width + own.out_width) / RATES.inside
    beside = exchange / groups + 2 * groups * RATES.call * (heads > 1)
    forward, backward = (
        np.maximum(time, exchange * (groups - 1) / groups) + beside + extra[:, which]
        for which, time in enumerate(stages)
    )
    whole = _slower(([ring.mask.pieces],) * 2, own, groups, whole=True)
    ideal = whole * own.pair_flops * float(work.sum()) / cp / RATES.forward
    return ideal, forward, backward


def _of_all(counted, members):
    most = np.max(list(counted.values()), axis=0)
    return np.array([counted.get(rank, most) for rank in range(members)])


def _amounts(table, size, near, shape):
    """Bytes in and out inside nodes, in and out between nodes: [4, members, hops]."""
    crosses = table.sender // near != table.receiver // near
    return np.stack(
        [
            np.bincount(
                (rank * shape[1] + table.hop)[link], table.tokens[link] * size, shape[0] * shape[1]
            ).reshape(shape)
            for link in (~crosses, crosses)
            for rank in (table.receiver, table.sender)
        ]
    )


def _link(amounts):
    return np.maximum(amounts[:2].max(0) / RATES.inside, amounts[2:].max(0) / RATES.between)


def _calls(rank):
    """The tiles of each kernel call in forward and in backward, and the updates of out, of dq, and
    of dk and dv by hop.
    """
    grids, made = [], []
    for hops in (rank.hops, rank.backward):
        lowered = [lower(hop.tiles, ASSUMED) for hop in hops]
        grids.append(
            [
                one.tiles[np.array([index for sequence in call for index in sequence])]
                for one in lowered
                for call in call_groups(one, ASSUMED.varlen)
            ]
        )
        made.append([kernel_calls(hop, ASSUMED) for hop in hops])
    queries = [
        query_updates(
            [[call.queries for call in hop] for hop in of], rank.num_tokens, of is made[1]
        )
        for of in made
    ]
    keys = gradient_updates(
        rank.backward, [[call.keys for call in hop] for hop in made[1]], rank.num_tokens
    )
    return grids[0], grids[1], *queries, keys


def _merges(calls, sizes, groups):
    """Seconds in which merges and sums read and write, in forward and in backward."""
    *_, out, dq, keys = calls
    element, lse = sizes.element, 0
    for update in out:
        lse += 0 if update.whole else 4 * (_read(update) + sum(_stored(update)))
    forward = sizes.out_width * sum(_accumulated(update, element) for update in out)
    backward = sizes.query_width * sum(_accumulated(update, element) for update in dq)
    of_keys = (update for updates in keys.values() for update in updates)
    backward += sizes.key_width * sum(_accumulated(update, element) for update in of_keys)
    return np.array([forward + lse * sizes.batch * sizes.heads, backward]) / RATES.memory


def _read(update):
    """Tokens read from partial results."""
    size = update.table[1] - update.table[0]
    return sum(int(size[step != 0].sum()) for step in update.table[5::2])


def _stored(update):
    """Tokens of the running total that are read and written, and of the result."""
    start, end, first, last = update.table[:4]
    return tuple(int((end - start)[x].sum()) for x in (first == 0, last == 0, last == 1))


def _accumulated(update, element):
    if update.whole:
        return 0
    loaded, kept, completed = _stored(update)
    return (_read(update) + completed) * element + (loaded + kept) * 4


def _slower(calls, sizes, groups, whole=False):
    """The time of calls in forward and in backward, relative to that at the speed of a full call of
    8,192 tokens and 16 heads. whole: no processor is ever without a block, no call is too short.
    """
    side = np.array([8192])
    known = _share([Tiles.columns(0, side, 0, side, hi=OPEN)], 16, processors=PROCESSORS)
    times = []
    for which, tiles in enumerate(calls[:2]):
        product = sizes.pair_flops[which] / sizes.batch / sizes.heads * BLOCK**2
        least = RATES.call * RATES.forward / known / PROCESSORS / product
        heads = sizes.batch * sizes.heads // groups
        filled = _share(tiles, heads, bool(which), 0 if whole else PROCESSORS, least)
        times.append(known / filled)
    return np.array(times)


def _share(calls, heads, backward=False, processors=0, least=0.0):
    """The share of the processors' time in which they compute allowed pairs; without `processors`
    of one block after another.
    """
    work, blocks, end, free = 0.0, 0, 0.0, np.zeros(processors)
    for tiles in calls:
        work += float(tiles.area().sum()) * heads / BLOCK**2
        durations, counts = np.unique(_products(tiles, backward) + BEGIN, return_counts=True)
        counts *= heads
        blocks += int(durations @ counts)
        if processors:
            np.maximum(free, end, out=free)
            end = max(_hand_out(durations, counts, free), end + least)
    time = processors * end if processors else blocks
    return work / time if work else 1.0


def _products(tiles, backward):
    """Matrix products of 128 x 128 of each block of a call."""
    q0, q1, k0, k1, lo, hi = tiles.data
    if backward:  # a strip of keys sees queries: the band as they see it
        q0, q1, k0, k1, lo, hi = k0, k1, q0, q1, -hi, -lo
    count = -(-(q1 - q0) // BLOCK)
    of, number = expand(np.zeros_like(count), count)
    first = q0[of] + number * BLOCK
    last = np.minimum(first + BLOCK, q1[of]) - 1
    start, end = np.maximum(k0[of], first + lo[of]), np.minimum(k1[of], last + hi[of] + 1)
    return np.maximum(-(-(end - start) // BLOCK), 0)


def _hand_out(durations, counts, free):
    """When the last block ends, the longest first, each on the processor that is free first."""
    end = 0.0
    for duration, left in zip(durations[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free.sort()
            wave = int(np.searchsorted(free, free[0] + duration))
            rounds = left // len(free) if wave == len(free) else 0
            wave = len(free) if rounds else min(wave, left)
            free[:wave] += duration * max(rounds, 1)
            left -= wave * max(rounds, 1)
            end = max(end, float(free[wave - 1]))
    return end
