"""Time: how long a pass of attention takes, and the hops in which it takes least.

A pass of a rank, forward or backward, is a series of stages: its hops that have work or messages,
where backward does half of hop 0 first and half of it last. A stage lasts as long as the longer of
two things: the computation of the rank, and the messages that arrive or leave meanwhile, over links
inside a node and between nodes. These messages are the keys of the next hop, and in backward also
the gradients of the hop before. Computation lasts at least as long as its longest block, which one
processor computes. Everything that chooses or predicts reads this formula (see
`cp_ring.plan.cost`).

A layout and a schedule are chosen by all ranks alike, before the layer, its device or the ranks of
a node are known: for `SIZES`, `RATES` and `NODE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, depth, union
from cp_ring.plan.schedule import Schedule, auto
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import RATES, Rates
from cp_ring.plan.sizes.head_split import split_heads
from cp_ring.plan.tiles import OPEN, Tiles

Floats = NDArray[np.float64]

SIZES, NODE = AttentionSizes(), 8
"""The layer, and the number of ranks of a node, for which layouts and schedules are chosen."""

BLOCK = 128
"""The number of queries, or of keys, of a kernel's block."""

AHEAD = (1.0, 3.0, float("inf"))
"""In compared schedules, a hop's keys take at most this many times the time that hides them."""


def stages(
    there: Floats, back: Floats, keys: Floats, gradients: Floats
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats], Ints]:
    """Return the seconds that each stage of each rank computes and moves data, in forward and in
    backward [ranks, stages], and the hop of each stage of forward.

    The arguments are seconds of each rank's hops [ranks, hops]: attention in forward (`there`) and
    in backward (`back`), its keys, and their gradients.
    """
    live = (there + keys + gradients) > 0
    live[:, 0] = True
    order = np.argsort(~live, 1, kind="stable")  # a rank skips hops without work and messages
    there, back, keys, gradients = (
        np.take_along_axis(table, order, 1) for table in (there, back, keys, gradients)
    )
    none = np.zeros((len(there), 1))
    moving = (
        np.concatenate([keys[:, 1:], none], 1),
        np.concatenate([keys[:, 1:], none, none], 1) + np.concatenate([none, gradients], 1),
    )
    back = np.concatenate([back, none], 1)
    back[:, 0] /= 2
    back[np.arange(len(back)), live.sum(1)] += back[:, 0]
    return (there, back), moving, order


def head_groups(sizes: AttentionSizes, heads: int) -> int:
    """Return the number of groups in which a rank computes its heads."""
    return split_heads(sizes.heads, sizes.kv_heads, heads).groups if heads > 1 else 1


def exchange_seconds(
    tokens: int,
    sizes: AttentionSizes,
    heads: int,
    ranks_per_node: int,
    rates: Rates,
    attention: float = float("inf"),
) -> float:
    """Return the seconds of the exchange of heads before and after attention that nothing hides, in
    a pass that takes `attention` seconds without it.

    It moves queries, keys, values and outputs of a rank's `tokens`, or their gradients. The
    exchange of one group of heads hides behind attention on another.
    """
    if heads == 1:
        return 0.0
    own, others = sizes.of_rank(heads), heads - 1
    groups = head_groups(sizes, heads)
    inside = min(ranks_per_node, heads) - 1
    size = tokens * own.element * (own.query_width + own.key_width + own.out_width)
    seconds = max(size * inside / rates.inside, size * (others - inside) / rates.between)
    behind = seconds - seconds / groups
    return seconds / groups + max(0.0, behind - attention) + 2 * groups * rates.call


def longest_blocks(tiles: Tiles, place: Ints, places: int) -> Ints:
    """Return the pairs of the longest block of each place, int64 [2, places], in forward and in
    backward: one processor of a device computes `BLOCK` queries of a head, or in backward `BLOCK`
    keys, with all that they see in a tile.
    """
    longest = np.zeros((2, places), np.int64)
    sides = tiles.q1 - tiles.q0, tiles.k1 - tiles.k0
    for most, side, seen in zip(longest, sides, sides[::-1], strict=True):
        pairs = np.minimum(side, BLOCK) * np.minimum(seen, tiles.hi - tiles.lo + 1)
        np.maximum.at(most, place, pairs)
    return longest


def block_seconds(longest: Ints, own: AttentionSizes, groups: int, rates: Rates) -> list[Floats]:
    """Return the seconds of the longest blocks (`longest_blocks`) in forward and in backward, one
    after another for each of the `groups` of a rank's heads.
    """
    speed = rates.flops / rates.processors * own.batch * own.heads / groups
    return [each * flops / speed for each, flops in zip(longest, own.pair_flops, strict=True)]


@dataclass(frozen=True, eq=False)
class Traffic:
    """The work and keys of each rank for the rank at each ring distance before it: arrays [cp, cp].

    pairs: pairs of the rank's queries and these keys.
    keys: tokens that the rank reads.
    calls: kernel calls, those for tiles without a band and with one, [2, cp, cp]: tiles that share
        a key are calls of their own.
    longest: pairs of the longest block, see `longest_blocks`, [2, cp, cp].
    shard: the number of tokens of the largest rank.
    heads: how many ranks exchange heads and count as one here.
    """

    pairs: Ints
    keys: Ints
    calls: Ints
    longest: Ints
    shard: int
    heads: int = 1

    @classmethod
    def of(
        cls, tiles: Tiles, area: Ints, rank: Ints, far: Ints, cp: int, shard: int, heads: int = 1
    ) -> Traffic:
        """Count the traffic of all tiles, joined where they can be, each of `area` pairs.

        `far` is the distance of each tile from the owner of its keys. Each token of an owner is
        counted once.
        """
        place = rank * cp + far
        pairs = np.bincount(place, area, cp * cp).astype(np.int64)
        group, start, end = union(place, tiles.k0, tiles.k1)
        keys = np.bincount(group, end - start, cp * cp).astype(np.int64).reshape(cp, cp)
        keys[:, 0] = 0
        band = (tiles.lo != -OPEN) | (tiles.hi != OPEN)
        calls = [depth(place[of], tiles.k0[of], tiles.k1[of], cp * cp) for of in (~band, band)]
        return cls(
            pairs.reshape(cp, cp),
            keys,
            np.stack(calls).reshape(2, cp, cp),
            longest_blocks(tiles, place, cp * cp).reshape(2, cp, cp),
            shard,
            heads,
        )

    @cached_property
    def _moving(self) -> Floats:
        """Seconds that keys travel, summed up to each distance, [4, cp, cp + 1]: arriving from
        inside the node and from others, leaving to ranks of the node and to others.
        """
        cp = len(self.keys)
        near = max(1, NODE // self.heads)
        reader, far = np.indices((cp, cp))
        crosses = reader // near != (reader - far) % cp // near
        size = self.keys * SIZES.of_rank(self.heads).on_wire()[0]
        arrive = np.where(
            crosses, [size * 0, size / RATES.between], [size / RATES.inside, size * 0]
        )
        leave = arrive[:, (reader + far) % cp, far]
        return np.pad(np.cumsum(np.concatenate([arrive, leave]), 2), ((0, 0), (0, 0), (1, 0)))

    @cached_property
    def bound(self) -> float:
        """A lower bound of `seconds`: all that a rank computes, or all that it moves."""
        sizes, pairs = SIZES.of_rank(self.heads), self.pairs.sum(1) / RATES.flops
        moving = self._moving[..., -1].max(0)
        sent, returned = sizes.on_wire()
        there, back = (pairs * flops for flops in sizes.pair_flops)
        both = np.maximum(there, moving) + np.maximum(back, moving * (1 + returned / sent))
        return float(both.max())

    def seconds(self, hops: Schedule) -> tuple[float, float]:
        """Return the seconds of forward and of backward with this schedule on the slowest rank."""
        cp, sizes = len(hops), SIZES.of_rank(self.heads)
        first = np.flatnonzero(np.diff(hops, prepend=-1))
        ends = np.append(first[1:], cp)
        moving = self._moving
        keys = (moving[..., ends] - moving[..., first]).max(0)
        sent, returned = sizes.on_wire()
        pairs = np.add.reduceat(self.pairs, first, 1)
        calls = np.maximum.reduceat(self.calls, first, 2).sum(0) * RATES.call
        longest = np.maximum.reduceat(self.longest, first, 2)
        there, back = (
            np.maximum(pairs * flops / RATES.flops, block) + calls
            for flops, block in zip(
                sizes.pair_flops,
                block_seconds(longest, sizes, head_groups(SIZES, self.heads), RATES),
                strict=True,
            )
        )
        compute, moves, _ = stages(there, back, keys, keys * returned / sent)
        forward, backward = (np.maximum(*each).sum(1) for each in zip(compute, moves, strict=True))
        slowest = int((forward + backward).argmax())
        return float(forward[slowest]), float(backward[slowest])

    def schedules(self, slot_shards: int) -> Iterator[Schedule]:
        """Yield schedules whose hops bring at most `slot_shards` shards, or one source.

        These are the schedule of the rule, and schedules in which the keys of a hop take at most a
        multiple (`AHEAD`) of the time that hides them.
        """
        cp = len(self.keys)
        most = slot_shards * self.shard
        yield auto(cp, slot_shards)
        brought = np.pad(np.cumsum(self.keys, 1), ((0, 0), (1, 0)))
        flops = SIZES.of_rank(self.heads).pair_flops[0] / RATES.flops
        worked = np.pad(np.cumsum(self.pairs, 1), ((0, 0), (1, 0))) * flops
        for ratio in AHEAD:
            hops, begin, behind = [0], 1, worked[:, 1]
            while begin < cp:
                moving = (self._moving[..., begin + 1 :] - self._moving[..., begin, None]).max(0)
                many = (brought[:, begin + 1 :] - brought[:, begin, None] > most).any(0)
                late = (moving > ratio * behind[:, None]).any(0) if ratio < np.inf else False
                end = begin + max(1, int(np.append(many | late, True).argmax()))
                hops += [hops[-1] + 1] * (end - begin)
                behind, begin = worked[:, end] - worked[:, begin], end
            yield tuple(hops)

    def fastest(self, slot_shards: int) -> tuple[Schedule, tuple[float, float]]:
        """Return the schedule of least time, and its `seconds`; of times that differ by less than a
        hundredth, the first.
        """
        timed = [(hops, self.seconds(hops)) for hops in dict.fromkeys(self.schedules(slot_shards))]
        least = min(sum(seconds) for _, seconds in timed)
        return next(each for each in timed if sum(each[1]) <= 1.01 * least)
