"""Token ranges that go from place to place, as data, with its proof: how the tokens of a rolled
sequence reach the ranks that hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, check_all

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Moves:
    """Ranges of tokens that go from ranks to ranks of one layout; int64 arrays of one length, one
    entry a range, in the order of the stream in which they arrive.

    sender, receiver: the ranks that hold the range before and after; equal for tokens that stay.
    source, target: where the range begins in the sender's shard and in the receiver's.
    tokens: how long it is, at least 1.
    """

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
            _places(layout, token) for token in ((cuts - shift) % n, cuts)
        )
        return cls(sender, receiver, source, target, np.diff(np.append(cuts, n)))

    def to(self, rank: int) -> list[tuple[int, Range]]:
        """What `rank` holds after the moves, range after range: the rank that held it before, and
        where in that rank's shard.
        """
        mine = self.receiver == rank
        columns = (self.sender, self.source, self.source + self.tokens)
        rows = np.stack([column[mine] for column in columns]).T.tolist()
        return [(sender, (start, end)) for sender, start, end in rows]

    def sends(self, rank: int) -> dict[int, list[Range]]:
        """Ranges of the rank's shard that go to each other rank, in the order in which the
        receiver's `to` has them.
        """
        ranges: dict[int, list[Range]] = {}
        leaving = (self.sender == rank) & (self.receiver != rank)
        columns = (self.receiver, self.source, self.source + self.tokens)
        for peer, start, end in np.stack([column[leaving] for column in columns]).T.tolist():
            ranges.setdefault(peer, []).append((start, end))
        return ranges

    def arriving(self, rank: int) -> dict[int, int]:
        """Tokens that come to `rank` from each other rank."""
        coming = (self.receiver == rank) & (self.sender != rank)
        count = np.bincount(self.sender[coming], self.tokens[coming]).astype(np.int64)
        return {peer: tokens for peer, tokens in enumerate(count.tolist()) if tokens}

    def verify_rolled(self, layout: Layout, shift: int) -> None:
        """Proves that these are the moves of a roll by `shift`: each token of each shard is filled
        once, with the token of the stream that belongs there.

        A range whose two ends are of one chunk is linear in the token, so both ends are enough.
        Raises `PlanError`.
        """
        check_all(self.tokens > 0, lambda i: f"moves: range {i} has {self.tokens[i]} tokens")
        last = self.tokens - 1
        stream = []
        for rank, start in ((self.sender, self.source), (self.receiver, self.target)):
            first = _in_stream(layout, rank, start)
            check_all(
                _in_stream(layout, rank, start + last) == first + last,
                lambda i: f"moves: range {i} is not of one chunk",
            )
            stream.append(first)
        before, after = stream
        check_all(
            (before + shift - after) % layout.n == 0,
            lambda i: f"moves: token {before[i]} goes to the place of token {after[i]}",
        )
        ends = np.append(after[1:], layout.n)
        if after[:1].tolist() != [0] or (after + self.tokens != ends).any():
            raise PlanError("moves: a token is filled twice, or not at all")


def _places(layout: Layout, token: Ints) -> tuple[Ints, Ints]:
    """The rank that holds each token of the stream, and where in its shard."""
    chunk = np.searchsorted(layout.edges, token, "right") - 1
    return layout.owner[chunk], layout.starts[chunk] + token - layout.edges[chunk]


def _in_stream(layout: Layout, rank: Ints, place: Ints) -> Ints:
    """The token of the stream at each place of the ranks' shards, -1 where there is none."""
    token = np.full(len(rank), -1)
    for holder in range(layout.cp):
        positions, mine = layout.positions(holder), rank == holder
        inside = (place[mine] >= 0) & (place[mine] < len(positions))
        token[mine] = np.where(inside, positions[np.where(inside, place[mine], 0)], -1)
    return token
