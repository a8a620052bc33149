"""From one layout to another: which tokens each rank sends to which, for layers that want their
tokens split in another way.

Only tokens that change ranks travel, each once. `verify` proves it, and that a rank puts everything
where it belongs, without the search that makes the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.proof.verify import check_layout
from cp_ring.plan.ranges import Ints, check_all, expand, overlaps, runs, starts_of
from cp_ring.plan.tables import Transfer
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True, eq=False)
class Conversion:
    """Token ranges that go from the ranks of layout `before` to those of layout `after`, which are
    for the same tokens and ranks.

    int64 arrays of one length, one entry a range, in the order of the stream:
        sender, receiver: the ranks that hold the range before and after; equal for tokens that
        stay.
        source, target: where the range begins in the sender's shard and in the receiver's.
        tokens: how long it is, at least 1.
    """

    before: Layout
    after: Layout
    sender: Ints
    receiver: Ints
    source: Ints
    target: Ints
    tokens: Ints

    @classmethod
    def build(cls, before: Layout, after: Layout) -> Conversion:
        """Raises `PlanError` if the layouts are for other numbers of tokens or ranks."""
        if (before.n, before.cp) != (after.n, after.cp):
            raise PlanError(
                f"layouts of {before.n} tokens on {before.cp} ranks and {after.n} on {after.cp}: "
                "they must be equal"
            )
        old, new = overlaps(before.edges[:-1], before.edges[1:], after.edges[:-1], after.edges[1:])
        start = np.maximum(before.edges[old], after.edges[new])
        end = np.minimum(before.edges[old + 1], after.edges[new + 1])
        source = before.starts[old] + start - before.edges[old]
        target = after.starts[new] + start - after.edges[new]
        ranges = cls(
            before, after, before.owner[old], after.owner[new], source, target, end - start
        )
        return ranges._joined()

    def _joined(self) -> Conversion:
        """Ranges that lie end to end on both sides become one."""
        follows = (np.diff(self.sender) == 0) & (np.diff(self.receiver) == 0)
        for start in (self.source, self.target):
            follows &= start[1:] == (start + self.tokens)[:-1]
        first = runs(~follows, len(self.tokens))[0]
        ranks = self.sender[first], self.receiver[first]
        tokens = np.add.reduceat(self.tokens, first)
        return Conversion(
            self.before, self.after, *ranks, self.source[first], self.target[first], tokens
        )

    @property
    def inverse(self) -> Conversion:
        """The way back."""
        ranks, starts = (self.receiver, self.sender), (self.target, self.source)
        return Conversion(self.after, self.before, *ranks, *starts, self.tokens)

    @property
    def traveling(self) -> Ints:
        """Tokens that change ranks, by sender and receiver: int64 [cp, cp]; the diagonal is 0."""
        cp = self.before.cp
        moved = (
            np.bincount(self.sender * cp + self.receiver, self.tokens, cp * cp)
            .astype(np.int64)
            .reshape(cp, cp)
        )
        np.fill_diagonal(moved, 0)
        return moved

    def sends(self, rank: int) -> list[Transfer]:
        """What `rank` sends, one entry for each other rank that gets something: ranges of its shard
        before.
        """
        return self._transfers(self.sender == rank, self.receiver, self.source, rank)

    def receives(self, rank: int) -> list[Transfer]:
        """What `rank` receives, in the order of the sender's ranges: ranges of its shard after."""
        return self._transfers(self.receiver == rank, self.sender, self.target, rank)

    def stays(self, rank: int) -> list[tuple[int, int, int]]:
        """Ranges that `rank` keeps: (place before, place after, tokens)."""
        mine = (self.sender == rank) & (self.receiver == rank)
        columns = np.stack([self.source, self.target, self.tokens])[:, mine]
        return [(before, after, tokens) for before, after, tokens in columns.T.tolist()]

    def _transfers(self, mine: np.ndarray, peers: Ints, start: Ints, rank: int) -> list[Transfer]:
        transfers = []
        for peer in np.unique(peers[mine]).tolist():
            which = np.flatnonzero(mine & (peers == peer))
            ranges = zip(start[which].tolist(), (start + self.tokens)[which].tolist(), strict=True)
            transfers += [Transfer(peer, tuple(ranges))] if peer != rank else []
        return transfers

    def verify(self) -> None:
        """Proves that every token leaves its place in one shard once, and arrives at its place in
        the other once.

        The places follow from the two layouts alone, token by token. Messages match, because both
        ends are one entry. Raises `PlanError`.
        """
        check_layout(self.before)
        check_layout(self.after)
        cp, size = self.before.cp, len(self.tokens)
        columns = self.sender, self.receiver, self.source, self.target, self.tokens
        if any(len(column) != size for column in columns) or (size and self.tokens.min() < 1):
            raise PlanError("conversion: a range is empty, or has no end")
        sent = _tokens(self.before, self.sender, self.source, self.tokens, "sender")
        received = _tokens(self.after, self.receiver, self.target, self.tokens, "receiver")
        wrong = np.flatnonzero(sent != received)
        if len(wrong):
            i = int(np.searchsorted(np.cumsum(self.tokens), wrong[0], "right"))
            where = f"rank {self.receiver[i]} gets token {sent[wrong[0]]} of rank {self.sender[i]}"
            raise PlanError(f"conversion: {where} in the place of token {received[wrong[0]]}")
        times = np.bincount(sent, minlength=self.before.n)
        check_all(
            times == 1,
            lambda i: f"conversion: token {i} is moved {times[i]} times, not once, on {cp} ranks",
        )


def _tokens(layout: Layout, ranks: Ints, starts: Ints, counts: Ints, what: str) -> Ints:
    """The tokens of the stream that are in these ranges of the shards of `ranks`, one after
    another.
    """
    exists = (ranks >= 0) & (ranks < layout.cp)
    check_all(exists, lambda i: f"conversion: a {what} is none of the {layout.cp} ranks")
    held = layout.tokens_per_rank
    inside = (starts >= 0) & (starts + counts <= held[ranks])
    check_all(inside, lambda i: f"conversion: a range is outside of the shard of its {what}")
    everything = np.concatenate([layout.positions(rank) for rank in range(layout.cp)])
    return everything[expand(starts_of(held)[ranks] + starts, counts)[1]]


@RUNTIME.cache(maxsize=64)
def conversion(before: Layout, after: Layout) -> Conversion:
    """The proven conversion; the same layouts give that of an earlier call. Raises `PlanError` as
    `Conversion.build`.
    """
    proven = Conversion.build(before, after)
    proven.verify()
    return proven
