"""Updates group the partial results that are added to a total at one time, so that memory is read
and written as rarely as possible.

A total is a tensor that a rank sums up: out with lse, dq, or dk with dv of one hop's keys. Its
partial results come one after the other, from kernel calls and from other ranks. An update is one
pass over memory: it reads up to `MAX_PARTS` partial results and the total that earlier updates have
stored, and stores the new total.

- Tokens that no earlier update has touched are stored, not added to zeros. So totals are not filled
  with zeros.
- Tokens that no later update will touch are stored in the dtype of the result. Such tokens at the
  ends of a total need no memory between updates.
- If it takes less memory, the result of backward, which holds more than forward, waits for the
  last update, which then touches all tokens: between updates there is only the running total, in
  float32, of all that earlier ones touch.
- Partial results are added one by one, in their order. So the result does not depend on how they
  are grouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import batched, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cp_ring.plan.ranges import Ints, runs, starts_of
from cp_ring.plan.records import OPEN, Hop, Transfer

MAX_PARTS = 4
"""The most partial results of one update, and so the most that wait for it."""


@dataclass(frozen=True, eq=False)
class Partial:
    """The tokens of a partial result.

    ranges: int64 [3, count], ranges of the total (start and end), and the position of the first
    token of each in the partial result.
    step: from a token's position to that of the next one, 1 or, in reverse order, -1.
    arrived: True if the partial result comes from another rank.
    """

    ranges: Ints
    step: int = 1
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
        on; with `reverse`, each is in reverse order there.
        """
        start, end = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
        size = end - start
        position = first + starts_of(size) + (size - 1) * reverse
        return cls(np.stack([start, end, position]), -1 if reverse else 1, arrived)

    def at(self, tokens: Ints) -> Ints:
        """Return the positions of tokens of the total, and the step from there to the next: int64
        [2, tokens], 0 for tokens that the partial result does not have.
        """
        start, end, position = self.ranges[:, np.argsort(self.ranges[0], kind="stable")]
        span = np.searchsorted(end, tokens, "right")
        inside = np.append(start, OPEN)[span] <= tokens
        first = np.append(position - self.step * start, 0)[span]
        return np.stack(np.broadcast_arrays(first + self.step * tokens, self.step)) * inside


class Update(NamedTuple):
    """One pass over a total; see `cp_ring.plan.records.Update`."""

    table: Ints
    whole: bool
    kept: slice


def query_updates(
    parts: Iterable[Iterable[Partial]], num_tokens: int, backward: bool
) -> tuple[Update, ...]:
    """Return the updates of out, or in backward of dq. `parts` has the parts of each hop's kernel
    calls in their order.

    Parts of the rank's own keys wait for the first remote ones; no others wait for the next hop, so
    that memory does not depend on the number of hops. But all wait for the last if together they
    take no more memory than a part and a running total in float32.
    """
    of_hops = [*map(list, parts)]
    sizes = [np.diff(part.ranges[:2], axis=0).sum() for part in chain(*of_hops)]
    waiting = len(of_hops) if len(sizes) <= MAX_PARTS and sum(sizes) <= 3 * num_tokens else 2
    of_hops[:waiting] = [[*chain(*of_hops[:waiting])]]
    return _updates(of_hops, num_tokens, backward)


def gradient_updates(
    hops: Sequence[Hop], parts: Sequence[Sequence[Partial]], num_tokens: int
) -> dict[int, tuple[Update, ...]]:
    """Return the updates of dk and dv by the index of the hop whose gradient buffer they fill; hop
    0 stands for the rank's own accumulators.

    `hops` are those of backward, and `parts` has the parts of each hop's kernel calls. Gradients
    that arrive during a hop are added after it, before the messages of the hop leave.
    """
    sizes = {hop.index: hop.num_grads for hop in hops} | {0: num_tokens}
    waiting: dict[int, list[list[Partial]]] = {index: [[]] for index in sizes}
    arriving: Sequence[tuple[Transfer, Transfer]] = ()

    def collect() -> None:
        for transfer, packed in arriving:
            part = Partial.of(transfer.ranges, packed.ranges[0][0], arrived=True)
            waiting[transfer.buffer][-1].append(part)
        for transfer, _ in arriving:
            waiting[transfer.buffer].append([])

    for hop, mine in zip(hops, parts, strict=True):
        waiting[hop.index][-1] += mine
        collect()
        arriving = hop.arrivals
    collect()
    return {index: _updates(waiting[index], size, True) for index, size in sizes.items()}


def _updates(
    waiting: Sequence[Sequence[Partial]], num_tokens: int, backward: bool
) -> tuple[Update, ...]:
    """Make updates of parts that wait together, whose buffers are then used again. The last one
    fills tokens that no part has with zeros.
    """
    groups = [group for each in waiting for group in batched(each, MAX_PARTS)] or [()]
    edges = [part.ranges[:2].reshape(-1) for group in groups for part in group]
    # Cells are the pieces of the total that no range begins or ends in.
    cells = np.unique(np.concatenate([[0, num_tokens], *edges]))
    none = np.zeros((0, len(cells) - 1), np.int64)
    tables = [np.concatenate([none, *(x.at(cells[:-1]) for x in group)]) for group in groups]
    touched = np.stack([table[1::2].any(0) for table in tables])
    touched[-1] |= ~touched.any(0)
    waits = touched.copy()
    waits[-1] = True
    kept, all_kept = _kept(touched, cells), _kept(waits, cells)
    # tokens in 16 bits, those of the running total in 32
    more = (all_kept.stop - all_kept.start) - (kept.stop - kept.start)
    if backward and 2 * more <= num_tokens:
        kept, touched = all_kept, waits
    count, found = np.cumsum(touched, 0), []
    whole = [[0, num_tokens, 1, 1, 0, 1]]
    for group, table, here, nth in zip(groups, tables, touched, count, strict=True):
        if here.any():
            first, last = nth == 1, nth == count[-1]
            rows = np.concatenate([[cells[:-1], cells[1:], first, last], table])
            table = _joined(rows[:, here])
            found.append(Update(table, table.T.tolist() == whole and not group[0].arrived, kept))
    return tuple(found)


def _joined(table: Ints) -> Ints:
    """Join neighboring segments of an update that are adjacent in all parts."""
    before, after = table[:, :-1], table[:, 1:]
    size = before[1] - before[0]
    joins = (before[1] == after[0]) & (before[2:4] == after[2:4]).all(0)
    joins &= (before[5::2] == after[5::2]).all(0)
    joins &= (before[4::2] + before[5::2] * size == after[4::2]).all(0)
    first, last = runs(~joins, table.shape[1])
    joined = table[:, first]
    joined[1] = table[1, last]
    return joined


def _kept(touched: NDArray[np.bool_], cells: Ints) -> slice:
    """Return the range of a total's tokens that are incomplete after one of its updates."""
    count = np.cumsum(touched, 0)
    (held,) = np.nonzero((touched & (count < count[-1])).any(0))
    return slice(*cells[[held[0], held[-1] + 1]].tolist()) if len(held) else slice(0, 0)
