"""Moves of token ranges between ranks, as data, with their proof: the tokens of a rolled sequence
go to the ranks that hold them, and the tokens of several ranks to the place where they lie
together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.layout import Layout
from cp_ring.plan.ranges import Ints, check_all, overlaps, runs, starts_of

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
    _read: dict[tuple[str, int], dict[int, Ranges]] = field(default_factory=dict, repr=False)

    @classmethod
    def rolled(cls, layout: Layout, shift: int) -> Moves:
        """Token i of the stream goes to the place of token (i + shift) mod n."""
        edges, n = layout.edges[:-1], layout.n
        # Between two cuts, tokens are of one chunk before and of one after.
        cuts = np.unique(np.concatenate([edges, (edges + shift) % n]))
        (sender, source), (receiver, target) = (
            _places(layout, token) for token in ((cuts - shift) % n, cuts)
        )
        tokens = np.diff(np.append(cuts, n))
        return cls(layout.cp, sender, receiver, source, target, tokens)

    @classmethod
    def gathered(cls, layout: Layout, members: Layout, member: int = 0) -> Moves:
        """An all-gather among the u neighboring ranks that act as one rank of the ring (number
        `member`, see `cp_ring.plan.members`): each of them gets the tokens of all u. `members` is
        `layout.merged(u)`; where u is the number of all ranks, each gets the whole sequence.
        """
        ranks = layout.cp // members.cp
        chunk = np.flatnonzero(layout.owner // ranks == member)
        chunk = chunk[np.argsort(layout.owner[chunk], kind="stable")]
        sender, size = layout.owner[chunk] - member * ranks, np.diff(layout.edges)[chunk]
        source, target = layout.starts[chunk], _places(members, layout.edges[chunk])[1]
        apart = (sender[1:] != sender[:-1]) | (target[1:] != (target + size)[:-1])
        first, last = runs(apart, len(chunk))
        tokens = (target + size)[last] - target[first]
        every = np.full(len(first), EVERY)
        return cls(ranks, sender[first], every, source[first], target[first], tokens)

    def sends(self, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the tensor of `rank` that go to each rank, itself among them."""
        if ("sends", rank) not in self._read:
            mine = self.sender == rank
            self._read["sends", rank] = self._by_peer(mine, self.receiver, self.source)
        return self._read["sends", rank]

    def receives(self, rank: int) -> dict[int, Ranges]:
        """Return the ranges of the new tensor of `rank` that come from each rank, in the order of
        that rank's `sends`.
        """
        if ("receives", rank) not in self._read:
            mine = (self.receiver == rank) | (self.receiver == EVERY)
            self._read["receives", rank] = self._by_peer(mine, self.sender, self.target)
        return self._read["receives", rank]

    def _by_peer(self, mine: np.ndarray, peer: Ints, start: Ints) -> dict[int, Ranges]:
        ranges: dict[int, list[tuple[int, int]]] = {}
        rows = np.stack([peer[mine], start[mine], (start + self.tokens)[mine]]).T.tolist()
        for other, first, last in rows:
            for to in range(self.ranks) if other == EVERY else (other,):
                ranges.setdefault(to, []).append((first, last))
        return {other: tuple(its) for other, its in ranges.items()}

    @cached_property
    def most_ranges(self) -> int:
        """The largest number of ranges that go from one rank to another one."""
        pair = self.sender * (self.ranks + 1) + self.receiver + 1
        return int(np.bincount(pair).max(initial=0))

    def held(self, rank: int) -> int:
        """Return the number of tokens that `rank` holds, if each of them goes to one place of each
        receiver.
        """
        return int(self.tokens[self.sender == rank].sum())

    def verify(
        self, before: Layout, after: Layout, shift: int = 0, member: int | None = None
    ) -> None:
        """Prove that each place of each receiver's new tensor is filled once, by the right token:
        token i of the stream comes to the place of token (i + shift) mod n.

        before, after: the layouts of the ranks' tensors before and after. With `member`, the ranks
        are those of this member, and each of them will hold the shard of rank `member` of `after`.

        Ranges are cut where a chunk of either layout begins. In a strip between two cuts the token
        of the stream goes up with the place, before and after, so checking the first token of each
        strip is enough. Raises `PlanError`.
        """
        check_all(self.tokens > 0, lambda i: f"moves: range {i} has {self.tokens[i]} tokens")
        sender, receiver, shards = self.sender, self.receiver, np.arange(after.cp)
        if member is not None:
            check_all(receiver == EVERY, lambda i: f"moves: range {i} does not go to every rank")
            first, shards = member * self.ranks, np.array([member])
            sender, receiver = sender + first, np.full(len(sender), member)
        source = self._within(before, sender, self.source)
        target = self._within(after, receiver, self.target)
        order, size = np.argsort(target, kind="stable"), after.tokens_per_rank
        start = starts_of(size)[shards[0]]
        ends = np.append(target[order][1:], start + size[shards].sum())
        if target[order][:1].tolist() != [start] or ((target + self.tokens)[order] != ends).any():
            raise PlanError("moves: a place is filled twice, or not at all")
        cells, stream = _cells(before)
        where, cell = overlaps(source, source + self.tokens, cells[:-1], cells[1:])
        begin = np.maximum(source[where], cells[cell])
        length = np.minimum((source + self.tokens)[where], cells[cell + 1]) - begin
        moved = target[where] + begin - source[where]
        token = stream[cell] + begin - cells[cell]
        cells, stream = _cells(after)
        strip, cell = overlaps(moved, moved + length, cells[:-1], cells[1:])
        place = np.maximum(moved[strip], cells[cell])
        leaves, comes = token[strip] + place - moved[strip], stream[cell] + place - cells[cell]
        check_all(
            (leaves + shift - comes) % before.n == 0,
            lambda i: (
                f"moves: token {leaves[i]} of rank {sender[where[strip[i]]]} goes to the "
                f"place of token {comes[i]}"
            ),
        )

    def _within(self, layout: Layout, rank: Ints, start: Ints) -> Ints:
        """Return where ranges of shards begin if the shards of all ranks lie end to end."""
        size = layout.tokens_per_rank
        known = (rank >= 0) & (rank < layout.cp)
        check_all(
            known & (start >= 0) & (start + self.tokens <= size[np.where(known, rank, 0)]),
            lambda i: f"moves: range {i} is outside of the shard of rank {rank[i]}",
        )
        return starts_of(size)[rank] + start


def _places(layout: Layout, token: Ints) -> tuple[Ints, Ints]:
    """Return the rank that holds each token of the stream, and the token's place in its shard."""
    chunk = np.searchsorted(layout.edges, token, "right") - 1
    return layout.owner[chunk], layout.starts[chunk] + token - layout.edges[chunk]


def _cells(layout: Layout) -> tuple[Ints, Ints]:
    """Lay the shards of all ranks end to end: return where chunks begin and the end of the last
    one, and the tokens of the stream at which chunks begin, in that order.
    """
    order = np.argsort(layout.owner, kind="stable")
    return np.append(0, np.cumsum(np.diff(layout.edges)[order])), layout.edges[order]
