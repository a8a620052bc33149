"""Time: how long a pass of attention takes, and the hops in which it takes least.

A pass of a rank, forward or backward, is a series of stages: its hops that have work or messages,
where backward does half of hop 0 first and half of it last. A stage lasts as long as the longer of
two things: the computation of the rank, and the messages that arrive or leave meanwhile, over links
inside a node and between nodes. These messages are the keys of the next hop, and in backward also
the gradients of the hop before. Computation lasts at least as long as its longest block, which one
processor computes; kernel calls and merges come beside. A pass lasts at least as long as its host
needs to issue it. Everything that chooses or predicts reads this formula (`Traffic.time`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, depth, union
from cp_ring.plan.records import Transfers
from cp_ring.plan.schedule import LONG, MOST_MEMBERS, Schedule, auto
from cp_ring.plan.sizes.attention_sizes import AttentionSizes
from cp_ring.plan.sizes.device_rates import Rates, running
from cp_ring.plan.sizes.head_split import unsplit
from cp_ring.plan.tiles import Tiles

Floats = NDArray[np.float64]

BLOCK = 128
"""The number of queries, or of keys, of a kernel's block."""

AHEAD = (1.0, 3.0, float("inf"))
"""In compared schedules, a hop's keys take at most this many times the time that hides them."""


_SIZES = AttentionSizes()


@dataclass(frozen=True)
class Conditions:
    """What time is predicted for: the sizes of a layer, the rates of devices and links, and how
    many neighboring ranks share a node. The defaults are those for which layouts and schedules are
    chosen, with the rates of the device that runs.
    """

    sizes: AttentionSizes = _SIZES
    rates: Rates = field(default_factory=running)
    node: int = 8

    def members(self, heads: int) -> int:
        """Return the number of members of the ring on a node, each of `heads` ranks: 1 if a node
        does not hold whole members, or holds one.
        """
        return 1 if self.node % heads else self.node // heads

    def pair_seconds(self, heads: int = 1) -> tuple[float, float]:
        """Return the seconds of a pair, over the heads of a rank, in forward and in backward."""
        there, back = self.sizes.of_rank(heads).pair_flops
        return there / self.rates.forward, back / self.rates.backward

    def exchange(self, tokens: int, heads: int, attention: float = float("inf")) -> float:
        """Return the seconds of the exchange of heads before and after attention that nothing
        hides, in a pass that takes `attention` seconds without it.

        It moves queries, keys, values and outputs of a rank's `tokens`, or their gradients. The
        exchange of one group of heads hides behind attention on another.
        """
        if heads == 1:
            return 0.0
        own, others, rates = self.sizes.of_rank(heads), heads - 1, self.rates
        groups = self.sizes.groups(heads)
        inside = min(self.node, heads) - 1
        size = tokens * own.element * (own.query_width + own.key_width + own.out_width)
        seconds = max(size * inside / rates.inside, size * (others - inside) / rates.between)
        behind = seconds - seconds / groups
        return seconds / groups + max(0.0, behind - attention) + 2 * groups * rates.call

    def heads_to_try(self, cp: int) -> list[int]:
        """Return how many of `cp` ranks may exchange heads: 1, and in a group of several nodes the
        three largest numbers that divide the ranks of a node and the heads, or, if there are fewer,
        the ranks of several nodes too.
        """
        near, sizes = self.node, self.sizes
        fitting = [
            heads
            for heads in (range(2, cp + 1) if 1 < near < cp else ())
            if not (cp % heads or (near % heads and heads % near))
            and not unsplit(sizes.heads, sizes.kv_heads, heads)
        ]
        inside = [heads for heads in fitting if heads <= near]
        return [1, *inside[-3:], *fitting[len(inside) :]][:4]


@dataclass(frozen=True, eq=False)
class PassTime:
    """Predicted seconds of one pass of a layer's attention, forward or backward.

    compute, moving: [members, stages], the seconds that each stage computes on each member of the
    ring, and that data moves meanwhile.
    hops: the hop of each stage but the last, which is empty or the second half of hop 0.
    host: [members], the seconds in which hosts issue the pass.
    exchange: the seconds of the exchange of heads that nothing hides.
    ideal: one kernel call on the whole sequence, divided evenly among the ranks.
    """

    compute: Floats
    moving: Floats
    hops: Ints
    host: Floats
    exchange: float
    ideal: float

    @property
    def stages(self) -> Floats:
        """The seconds of each stage."""
        return np.maximum(self.compute, self.moving)


@dataclass(frozen=True, eq=False)
class AttentionTime:
    """Predicted time of one layer's attention, of its forward pass and its backward pass."""

    there: PassTime
    back: PassTime

    def _slowest(self, passes: int) -> tuple[float, float]:
        """Return the seconds of the slowest rank in the first `passes`, and the part of them in
        which it waits.
        """
        of = (self.there, self.back)[:passes]
        total = np.sum([np.maximum(each.stages.sum(1), each.host) for each in of], 0)
        rank, exchange = int(total.argmax()), sum(each.exchange for each in of)
        busy = sum(float(each.compute[rank].sum()) for each in of)
        seconds = float(total[rank]) + exchange
        return seconds, seconds - busy

    @property
    def forward(self) -> float:
        """The seconds of forward on the slowest rank."""
        return self._slowest(1)[0]

    @cached_property
    def both(self) -> float:
        """The seconds of forward and backward together on the slowest rank."""
        return self._slowest(2)[0]

    @property
    def ideal(self) -> float:
        """The seconds of both passes, if they were one kernel call each, divided evenly."""
        return self.there.ideal + self.back.ideal

    @property
    def waits(self) -> tuple[float, float]:
        """The seconds of `forward` and of `both` that the slowest rank waits for messages or its
        host."""
        return self._slowest(1)[1], self._slowest(2)[1]


def least(seconds: Sequence[float]) -> int:
    """Return the index of the least time; of times that differ by less than a hundredth, the
    first.
    """
    return next(i for i, time in enumerate(seconds) if time <= 1.01 * min(seconds))


def _sums_before(amounts: np.ndarray) -> np.ndarray:
    """Return the sums of the amounts of smaller ring distances, and of all, [.., cp + 1]."""
    return np.insert(np.cumsum(amounts, -1), 0, 0, -1)


class Traffic:
    """The work and keys of each rank for the rank at each ring distance before it: arrays [cp, cp].

    pairs: pairs of the rank's queries and these keys.
    keys: tokens that the rank reads. Each token of an owner is counted once.
    results: tokens of results of kernel calls.
    calls: kernel calls, all and those of several tiles, each for tiles without a band and with one,
        [2, 2, cp, cp]: tiles that share a key are calls of their own.
    longest: pairs of the longest block, in forward and in backward: one processor of a device
        computes `BLOCK` queries of a head, or in backward `BLOCK` keys, with all that they see in
        a tile, [2, cp, cp].
    shard: the number of tokens of the largest rank.

    It is counted from all tiles, joined where they can be, each of `rank` and `far` from the owner
    of its keys, between members of `heads` ranks with `shards` tokens. `given` is what time is
    predicted for, and `area` counts the pairs of each tile.
    """

    def __init__(
        self,
        tiles: Tiles,
        rank: Ints,
        far: Ints,
        shards: Ints,
        heads: int,
        given: Conditions,
        area: Callable[[Tiles], Ints] = Tiles.area,
    ):
        cp = len(shards)

        def table(place: Ints, amount: Ints) -> Ints:
            return np.bincount(place, amount, cp * cp).astype(np.int64).reshape(cp, cp)

        self.heads, self.given, self.shard = heads, given, int(shards.max())
        place = rank * cp + far
        self.pairs = table(place, area(tiles))
        group, start, end = union(place, tiles.k0, tiles.k1)
        self.keys = table(group, end - start)
        self.keys[:, 0] = 0
        sides = tiles.q1 - tiles.q0, tiles.k1 - tiles.k0
        self.results = table(place, sides[0])
        kind = tiles.banded * cp * cp + place
        calls = depth(kind, tiles.k0, tiles.k1, 2 * cp * cp)
        several = np.bincount(kind, minlength=len(calls)) > calls
        self.calls = np.stack([calls, calls * several]).reshape(2, 2, cp, cp)
        self.longest = np.zeros((2, cp, cp), np.int64)
        for most, side, seen in zip(self.longest, sides, sides[::-1], strict=True):
            pairs = np.minimum(side, BLOCK) * np.minimum(seen, tiles.hi - tiles.lo + 1)
            np.maximum.at(most, (rank, far), pairs)

    @cached_property
    def _moving(self) -> Floats:
        """The `links` of keys that go straight to their readers, summed up to each distance, [4,
        cp, cp + 1].
        """
        reader, far = np.indices(self.keys.shape).reshape(2, -1)
        size = self.keys.reshape(-1) * self.given.sizes.of_rank(self.heads).on_wire()[0]
        moved = self.links((reader - far) % len(self.keys), reader, far, size)
        return _sums_before(moved)

    @cached_property
    def bound(self) -> float:
        """A lower bound of the time: all that a rank computes, or all that it moves."""
        pairs = self.pairs.sum(1)
        moving = self._moving[..., -1].max(0)
        sent, returned = self.given.sizes.of_rank(self.heads).on_wire()
        there, back = (pairs * seconds for seconds in self.given.pair_seconds(self.heads))
        both = np.maximum(there, moving) + np.maximum(back, moving * (1 + returned / sent))
        return float(both.max())

    def time(self, hops: Schedule, messages: Sequence[Transfers] = ()) -> AttentionTime:
        """Return the time with this schedule. `messages` are those of keys and of gradients;
        without them they go straight to their readers and back.
        """
        given, first = self.given, np.searchsorted(hops, np.arange(hops[-1] + 1))
        own, rates = given.sizes.of_rank(self.heads), given.rates
        groups = given.sizes.groups(self.heads)
        sent, returned = widths = own.on_wire()
        if messages:
            links = [
                self.links(each.sender, each.receiver, each.hop, each.tokens * width).max(0)
                for each, width in zip(messages, widths, strict=True)
            ]
        else:
            keys = np.diff(self._moving.take(np.append(first, len(hops)), 2)).max(0)
            links = [keys, keys * returned / sent]
        moving = np.stack(links)[..., : len(first)]
        moving += (moving > 0) * rates.start
        pairs, read = (np.add.reduceat(table, first, 1) for table in (self.pairs, self.keys))
        results = np.maximum.reduceat(self.results, first, 1)
        results[:, 0] = 0  # nothing is there to merge them with
        # of forward and of backward
        merged = np.stack(
            [results * own.out_width, results * own.query_width + read * own.key_width]
        )
        of_merge = rates.merging / rates.memory * (own.element + 8)  # a part, and float32 twice
        calls, packed = np.maximum.reduceat(self.calls, first, 3).sum(1) * groups
        # one processor computes the longest blocks of its heads, a group after another
        alone = rates.processors * groups / (own.batch * own.heads)
        longest = np.maximum.reduceat(self.longest, first, 2) * alone
        of_pair = given.pair_seconds(self.heads)
        decoding = np.divide(own.decode_flops, (rates.forward, rates.backward))
        of_pairs, of_keys = (np.reshape(each, (2, 1, 1)) for each in (of_pair, decoding))
        compute = np.maximum(pairs, longest) * of_pairs + read * of_keys + merged * of_merge
        compute += calls * rates.call + packed * rates.packed
        live = compute[0] + moving.sum(0) > 0
        live[:, 0] = True
        # a rank skips hops without work and messages; backward has a stage more
        hops_of_rank, order = live.sum(1), np.argsort(~live, 1, kind="stable")
        tables = np.zeros((4, len(live), len(first) + 1))
        tables[..., :-1] = np.take_along_axis(np.concatenate([compute, moving]), order[None], 2)
        there, back, keys, gradients = tables
        back[:, 0] /= 2
        back[np.arange(len(back)), hops_of_rank] += back[:, 0]
        arriving = np.zeros((2, *keys.shape))
        arriving[..., :-1] = keys[:, 1:]
        arriving[1, :, 1:] += gradients[:, :-1]
        tokens, ideal = -(-self.shard // self.heads), int(self.pairs.sum()) / len(hops)

        def a_pass(compute: Floats, moving: Floats, of_pair: float, issues: int) -> PassTime:
            longest = float(np.maximum(compute, moving).sum(1).max())
            exchange = given.exchange(tokens, self.heads, longest)
            host = issues * hops_of_rank * rates.host
            return PassTime(compute, moving, order, host, exchange, ideal * of_pair)

        return AttentionTime(*map(a_pass, (there, back), arriving, of_pair, (1, 2)))

    def links(self, sender: Ints, receiver: Ints, hop: Ints, size: Ints) -> Floats:
        """Return the seconds in which messages of `size` bytes travel by each rank and hop, or
        distance, [4, cp, cp]: in and out, inside nodes and between nodes, at the same time.
        """
        near, rates, cp = self.given.members(self.heads), self.given.rates, len(self.keys)
        crosses = sender // near != receiver // near
        places = receiver * cp + hop, sender * cp + hop
        seconds = [
            np.bincount(place, size * link, cp * cp) / rate
            for link, rate in ((~crosses, rates.inside), (crosses, rates.between))
            for place in places
        ]
        return np.reshape(seconds, (4, cp, cp))

    def filled(self, most: int, ratios: Sequence[float] = (np.inf,)) -> Iterator[Schedule]:
        """Yield for each ratio the schedule whose hops have as many sources as bring keys of at
        most `most` tokens, in at most this many times the time that hides them, or one source.
        """
        brought, (there, _) = _sums_before(self.keys), self.given.pair_seconds(self.heads)
        worked = _sums_before(self.pairs) * there
        number = np.arange(len(brought))[:, None]
        rows = brought + number * (brought.max() + most + 1)  # one behind another
        ends = np.searchsorted(rows.ravel(), rows + most, "right") - number * rows.shape[1]
        ends = ends.min(0) - 1
        for ratio in ratios:
            hops, begin, behind = [0], 1, worked[:, 1]
            while begin < len(worked):
                end = max(begin + 1, int(ends[begin]))
                if ratio < np.inf:
                    moved = self._moving[..., begin + 1 : end + 1] - self._moving[..., begin, None]
                    hides = (moved.max(0) <= ratio * behind[:, None]).all(0)
                    end = begin + max(1, int(hides.sum()))
                hops += [hops[-1] + 1] * (end - begin)
                behind, begin = worked[:, end] - worked[:, begin], end
            yield tuple(hops)

    def fastest(self, slot_shards: int) -> tuple[Schedule, AttentionTime]:
        """Return the schedule of the `least` time, and this time. Its hops bring at most
        `slot_shards` shards, or one source: it is the rule's, or one in which the keys of a hop
        take at most a multiple (`AHEAD`) of the time that hides them.
        """
        cp = len(self.keys)
        rule = auto(cp, slot_shards)
        timed = {rule: self.time(rule)}
        if least([timed[rule].both, self.bound]):  # another one could be faster
            ratios = AHEAD if cp <= MOST_MEMBERS else AHEAD[-1:]
            others = self.filled(slot_shards * self.shard, ratios)
            timed |= {hops: self.time(hops) for hops in dict.fromkeys(others) if hops != rule}
        return [*timed.items()][least([time.both for time in timed.values()])]

    def backward(self, hops: Schedule, time: AttentionTime) -> Schedule:
        """Return the hops of backward if forward has `hops` and both would take `time` with them.

        A hop of backward holds gradients beside keys, and computes 2.5 times as long as forward.
        So it brings the keys of one shard, or of `LONG` tokens, where that costs no more than a
        hundredth of the time. Rings of more than `MOST_MEMBERS` would have too many hops.
        """
        first = np.searchsorted(hops, np.arange(1, hops[-1] + 1))
        most = max(self.shard, LONG)
        if len(hops) > MOST_MEMBERS or np.add.reduceat(self.keys, first, 1).max() <= most:
            return hops
        (back,) = self.filled(most)
        both = replace(time, back=self.time(back).back).both
        return (back, hops)[least([both, time.both])]
