"""Moves of token ranges between ranks, as data, with their proof: the tokens of a rolled sequence
go to the ranks that hold them, and the tokens of several ranks to the place where they lie
together.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, runs
from cp_ring.runtime import RUNTIME

Ranges = tuple[tuple[int, int], ...]

EVERY = -1
"""Stands for the receiver of a range that every rank gets."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Ranges of tokens that go among `ranks` ranks; int64 arrays of one length, one entry a range.
    The ranges between two ranks ascend in both shards or, for a roll, in the receiver's shard.

    sender, receiver: the ranks that hold the range before and after; equal for tokens that stay.
    The receiver may be `EVERY`.
    source, target: where the range begins in the sender's tensor before, and in the receiver's
    tensor after.
    tokens: the length of the range, at least 1.
    """

    ranks: int
    sender: Ints
    receiver: Ints
    source: Ints
    target: Ints
    tokens: Ints

    @classmethod
    def rolled(cls, layout: Layout, shift: int) -> Moves:
        """Token i of the stream goes to the place of token (i + shift) mod n."""
        edges, n = layout.edges[:-1], layout.n
        # Between two cuts, tokens are of one chunk before and of one after.
        cuts = np.unique(np.concatenate([edges, (edges + shift) % n]))
        (sender, source), (receiver, target) = (
            places(layout, token) for token in ((cuts - shift) % n, cuts)
        )
        tokens = np.diff(np.append(cuts, n))
        return cls(layout.cp, sender, receiver, source, target, tokens)

    @classmethod
    def gathered(cls, layout: Layout, members: Layout, member: int = 0) -> Moves:
        """An all-gather among the u neighboring ranks that act as one rank of the ring (number
        `member`, see `cp_ring.plan.sizes.head_split`): each of them gets the tokens of all u.
        `members` is `layout.merged(u)`; where u is the number of all ranks, each gets the whole
        sequence.
        """
        ranks = layout.cp // members.cp
        chunk = layout.order[layout.owner[layout.order] // ranks == member]
        sender, size = layout.owner[chunk] - member * ranks, np.diff(layout.edges)[chunk]
        source, target = layout.starts[chunk], places(members, layout.edges[chunk])[1]
        return cls.joined(ranks, sender, np.full_like(chunk, EVERY), source, target, size)

    @classmethod
    def joined(
        cls, ranks: int, sender: Ints, receiver: Ints, source: Ints, target: Ints, tokens: Ints
    ) -> Moves:
        """The moves of ranges of which those that lie end to end, at both ends, are joined."""
        start = np.stack([sender, receiver, source, target])
        end = np.stack([sender, receiver, source + tokens, target + tokens])
        first, last = runs((end[:, :-1] != start[:, 1:]).any(0), len(sender))
        sender, receiver, source, target = start[:, first]
        return cls(ranks, sender, receiver, source, target, end[2, last] - source)

    @RUNTIME.cache(maxsize=64)
    def sends(self, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the tensor of `rank` that go to each rank, itself among them."""
        return self._by_peer(rank, self.sender, self.receiver, self.source)

    @RUNTIME.cache(maxsize=64)
    def receives(self, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the new tensor of `rank` that come from each rank, in the order of
        that rank's `sends`.
        """
        return self._by_peer(rank, self.receiver, self.sender, self.target)

    def _by_peer(self, rank: int, own: Ints, peer: Ints, start: Ints) -> dict[int, Ranges]:
        ranges = defaultdict[int, list[tuple[int, int]]](list)
        mine = (own == rank) | (own == EVERY)
        for other, *ends in np.stack([peer, start, start + self.tokens])[:, mine].T.tolist():
            for to in range(self.ranks) if other == EVERY else (other,):
                ranges[to].append(tuple(ends))
        return {other: tuple(its) for other, its in ranges.items()}

    @cached_property
    def most_ranges(self) -> int:
        """The largest number of ranges that go from one rank to another one."""
        pair = self.sender * (self.ranks + 1) + self.receiver + 1
        return int(np.bincount(pair).max(initial=0))


def places(layout: Layout, token: Ints) -> tuple[Ints, Ints]:
    """Return the rank that holds each token of the stream, and the token's place in its shard."""
    chunk = np.searchsorted(layout.edges, token, "right") - 1
    return layout.owner[chunk], layout.starts[chunk] + token - layout.edges[chunk]
