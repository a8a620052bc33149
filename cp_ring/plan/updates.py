"""Updates group the partial results that are added to a total at one time, so that memory is read
and written as rarely as possible.

A total is a tensor that a rank sums up: out with lse, dq, or dk with dv of one hop's keys. Its
partial results come one after the other, from kernel calls and from other ranks. An update is one
pass over memory: it reads up to `MAX_PARTS` partial results and the total that earlier updates have
stored, and stores the new total.

- Tokens that no earlier update has touched are stored, not added to zeros. So totals are not filled
  with zeros.
- Tokens that no later update will touch are stored in the dtype of the result. So the result needs
  no cast.
- Partial results are added one by one, in their order. So the result does not depend on how they
  are grouped.

The executor runs these updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from cp_ring.plan.ranges import Ints, overlaps, runs, starts_of
from cp_ring.plan.records import Hop, Transfer

MAX_PARTS = 4
"""The most partial results of one update, and so the most that wait for it."""

ABSENT = -1
"""The position of a segment in a partial result that has none of its tokens."""


@dataclass(frozen=True, eq=False)
class Partial:
    """The tokens of a partial result: range i of the total, [start[i], end[i]), is at `position[i]`
    of the partial result.

    With `reverse`, each range is in reverse order there. `arrived` is True if the partial result
    comes from another rank.
    """

    start: Ints
    end: Ints
    position: Ints
    reverse: bool = False
    arrived: bool = False

    @classmethod
    def of(
        cls,
        ranges: Sequence[tuple[int, int]],
        first: int = 0,
        reverse: bool = False,
        arrived: bool = False,
    ) -> Partial:
        """Make a `Partial` of ranges that lie end to end in the partial result, from token `first`
        on.
        """
        start, end = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        return cls(start, end, first + starts_of(end - start), reverse, arrived)


@dataclass(frozen=True, eq=False)
class Update:
    """One pass over memory.

    segments: int64 [4 + parts, count], for each segment of the total's tokens
        start and end;
        1 if no earlier update has stored something there, else 0;
        1 if no later update will, else 0;
        and for each part the position of its first token, ABSENT if the part has none of the
        tokens, or -2 - position if the part has them in reverse order. A segment without parts is
        filled with zeros.
    whole: True if a kernel call's part is the whole total: nothing has to be computed, nor moved if
    its dtype is right. It is False for parts that arrive, because the next messages will overwrite
    their buffer.
    """

    segments: Ints
    whole: bool


@dataclass
class _Total:
    """The partial results of one total, grouped into updates."""

    num_tokens: int
    most: int = MAX_PARTS
    groups: list[list[Partial]] = field(default_factory=list)
    closed: bool = True

    def add(self, part: Partial) -> None:
        if self.closed or len(self.groups[-1]) == self.most:
            self.groups.append([])
        self.groups[-1].append(part)
        self.closed = False

    def close(self) -> None:
        """Close the last fused update. The next partial result starts another one, because the
        input buffer is reused.
        """
        self.closed = True


def query_updates(
    parts: Iterable[Iterable[Partial]], num_tokens: int, most: int = MAX_PARTS
) -> tuple[Update, ...]:
    """Return the updates of out, or of dq, each of at most `most` parts. `parts` has the parts of
    each hop's kernel calls in their order.

    Parts of the rank's own keys wait for the first remote ones; no others wait for the next hop, so
    that memory does not depend on the number of hops.
    """
    total = _Total(num_tokens, most)
    for place, of_hop in enumerate(parts):
        for part in of_hop:
            total.add(part)
        if place:
            total.close()
    return _updates(total.groups, num_tokens)


def gradient_updates(
    hops: Sequence[Hop], parts: Sequence[Sequence[Partial]], num_tokens: int
) -> dict[int, tuple[Update, ...]]:  # fmt: skip
    """Return the updates of dk and dv by the index of the hop whose gradient buffer they fill; hop
    0 stands for the rank's own accumulators.

    `hops` are those of backward, and `parts` has the parts of each hop's kernel calls. Gradients
    that arrive during a hop are added after it, before the messages of the hop leave.
    """
    totals = {0: _Total(num_tokens)} | {
        hop.index: _Total(hop.num_grads) for hop in hops if hop.index
    }
    arriving: list[tuple[Transfer, Partial]] = []

    def collect() -> None:
        for transfer, part in arriving:
            totals[transfer.buffer].add(part)
        for transfer, _ in arriving:
            totals[transfer.buffer].close()

    for hop, mine in zip(hops, parts, strict=True):
        for part in mine:
            totals[hop.index].add(part)
        collect()
        sizes = [transfer.tokens for transfer in hop.grad_receives]
        places = accumulate(sizes, initial=0)
        arriving = [
            (t, Partial.of(t.ranges, first, arrived=True))
            for t, first in zip(hop.grad_receives, places, strict=False)
        ]
    collect()
    return {index: _updates(total.groups, total.num_tokens) for index, total in totals.items()}


def running_tokens(updates: Sequence[Update]) -> slice:
    """Return the range of a total's tokens that are incomplete after one of its updates. Others
    need no memory between updates.
    """
    spans = [update.segments[:2, update.segments[3] == 0] for update in updates]
    start, end = np.concatenate([np.zeros((2, 0), np.int64), *spans], 1)
    return slice(int(start.min()), int(end.max())) if len(start) else slice(0, 0)


def _updates(groups: Sequence[Sequence[Partial]], num_tokens: int) -> tuple[Update, ...]:
    """Make one update for each group. The last one fills tokens that no part has with zeros."""
    parts = [part for group in groups for part in group]
    start, end, position = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(part, name) for part in parts)])
        for name in ("start", "end", "position")
    )
    owner = np.repeat(np.arange(len(parts)), [len(part.start) for part in parts])
    slot = np.array([i for group in groups for i in range(len(group))], np.int64)[owner]
    number = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[owner]
    reverse = np.array([part.reverse for part in parts], bool)[owner]

    # Cells are the pieces of the total that no range begins or ends in.
    edges = np.unique(np.concatenate([[0, num_tokens], start, end]))
    span, cell = overlaps(start, end, edges[:-1], edges[1:])
    backward, onward = -2 - (position + end - 1)[span], (position - start)[span]
    place = np.where(reverse[span], backward, onward) + edges[cell]
    earliest, latest = np.full(len(edges) - 1, len(groups)), np.full(len(edges) - 1, -1)
    np.minimum.at(earliest, cell, number[span])
    np.maximum.at(latest, cell, number[span])
    bare = np.flatnonzero(latest < 0)

    order = np.argsort(number[span], kind="stable")
    cuts = np.searchsorted(number[span][order], np.arange(max(len(groups), 1) + 1))
    updates = []
    for index, (low, high) in enumerate(pairwise(cuts)):
        pairs = order[low:high]
        cells = np.unique(cell[pairs])
        if index == len(cuts) - 2:
            cells = np.union1d(cells, bare)
        members = groups[index] if groups else ()
        table = np.full((4 + len(members), len(cells)), ABSENT)
        table[:2] = edges[cells], edges[cells + 1]
        unseen = latest[cells] < 0
        table[2], table[3] = unseen | (earliest[cells] == index), unseen | (latest[cells] == index)
        table[4 + slot[span[pairs]], np.searchsorted(cells, cell[pairs])] = place[pairs]
        if len(cells):
            table = _joined(table)
            whole = table.T.tolist() == [[0, num_tokens, 1, 1, 0]]
            updates.append(Update(table, whole and not members[0].arrived))
    return tuple(updates)


def _joined(table: Ints) -> Ints:
    """Join neighboring segments of an update that are adjacent in all parts."""
    before, after = table[:, :-1], table[:, 1:]
    size = before[1] - before[0]
    goes_on = np.where(
        before[4:] == ABSENT,
        after[4:] == ABSENT,
        (after[4:] == before[4:] + size) & (after[4:] != ABSENT),
    )
    joins = (before[1] == after[0]) & (before[2:4] == after[2:4]).all(0) & goes_on.all(0)
    first, last = runs(~joins, table.shape[1])
    joined = table[:, first]
    joined[1] = table[1, last]
    return joined
