"""Packing: documents of any length into rows of equal length, for training without padding.

Two ways: `first-fit` puts the longest documents first, each into the first row with room for it
(first-fit decreasing, which needs at most 11/9 of the fewest rows plus 6/9: Dosa, "The Tight Bound
of First Fit Decreasing Bin-Packing Algorithm", 2007); `fill` keeps their order and cuts documents
at the ends of rows, so that only the last row has padding. The result depends on the lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, check_all, expand

PADDING = 1024
"""The most tokens of a document of padding: attention over all padding of a row, as one document,
would take the time of the longest ones.
"""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of `capacity` tokens, filled with pieces of documents. A document that is not cut is one
    piece.

    Attributes:
        first: int64 [rows + 1], the first piece of each row.
        document, start, length: int64 [pieces] in the order of the rows: each piece's document, its
            first token in the document, and its number of tokens.
    """

    capacity: int
    first: Ints
    document: Ints
    start: Ints
    length: Ints

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.first) - 1

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, tokens) for each piece of a row, in order."""
        columns = np.stack([self.document, self.start, self.length])
        pieces = columns[:, self.first[row] : self.first[row + 1]]
        return [(document, start, length) for document, start, length in pieces.T.tolist()]

    def cu_seqlens(self, row: int) -> Ints:
        """Return the offsets of a row's pieces, int64, and after them those of its padding, which
        is cut into documents of at most `PADDING` tokens.
        """
        length = self.length[self.first[row] : self.first[row + 1]]
        ends = np.cumsum(length)
        padding = np.arange(ends[-1], self.capacity, PADDING)
        return np.concatenate([[0], ends[:-1], padding, [self.capacity]])

    def describe(self) -> str:
        """Return one line, such as `1,000 documents in 40 rows of 4,096 tokens: 99.90 % filled`."""
        documents = len(np.unique(self.document))
        filled = self.length.sum() / (self.rows * self.capacity)
        return (
            f"{documents:,} documents in {self.rows:,} rows of {self.capacity:,} tokens: "
            f"{100 * filled:.2f} % filled"
        )


def pack(size: Ints, capacity: int, how: str = "first-fit", cut_long: bool = False) -> PackedRows:
    """Pack documents of these sizes (int64 [documents], each at least 1 token) into rows of
    `capacity` tokens.

        packing = pack(np.array([900, 3000, 500, 2500, 196]), capacity=4096)

    how: `first-fit` or `fill`.
    cut_long: cut a document that is longer than a row into row-sized pieces and a rest, instead of
        raising; `fill` always cuts.

    Raises `PlanError` if there is no document, and for a document longer than a row that may not be
    cut.
    """
    if not len(size):
        raise PlanError("there is no document to pack")
    if how == "fill":
        return _fill(size, capacity)
    check_all(
        (size <= capacity) | cut_long,
        lambda i: (
            f"document {i} has {size[i]:,} tokens, more than the {capacity:,} of a row: make rows "
            "longer, or let long documents be cut"
        ),
    )
    document, part = expand(np.zeros_like(size), -(-size // capacity))
    start = part * capacity
    length = np.minimum(size[document] - start, capacity)
    row = _first_fit(length, capacity)
    sort = np.lexsort((start, document, row))
    first = np.searchsorted(row[sort], np.arange(int(row.max()) + 2))
    return PackedRows(capacity, first, document[sort], start[sort], length[sort])


def _fill(size: Ints, capacity: int) -> PackedRows:
    ends = np.cumsum(size)
    total = int(ends[-1])
    edges = np.union1d(np.concatenate([[0], ends]), np.arange(0, total, capacity))
    starts = edges[:-1]
    length = np.diff(edges)
    document = np.searchsorted(ends, starts, side="right")
    first = np.append(np.searchsorted(starts, np.arange(0, total, capacity)), len(starts))
    return PackedRows(capacity, first, document, starts - (ends - size)[document], length)


def _first_fit(length: Ints, capacity: int) -> Ints:
    """Return the row of each piece. Rows are numbered by their first document, so that the order of
    a file is roughly kept.

    A tree holds the free room of each row; an inner node holds the maximum of its children. So a
    row is found in as many steps as the tree has levels.
    """
    leaves = 1 << (len(length) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    row = np.zeros(len(length), np.int64)
    order = np.argsort(-length, kind="stable")
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < size
        row[piece] = node - leaves
        room[node] -= size
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    used, first = np.unique(row, return_index=True)
    rank = np.empty(len(used), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(used))
    return rank[np.searchsorted(used, row)]


Work = NDArray[np.float64]


def balanced_order(work: Work) -> Ints:
    """Return the batch row at each place, by its number in reading order: int64, in the shape of
    `work`.

    work: the work of the row at each place, [ranks, microbatches, rows of a microbatch], not
        negative.

    Keeps the reading order if no other order shortens the longest microbatch or the longest rank.
    """
    ranks, microbatches = work.shape[:2]
    flat = work.reshape(-1)
    filled = _longest_first(flat, ranks * microbatches)
    load = flat[filled].sum(1)
    order = filled[np.sort(_longest_first(load, ranks), 1)]
    before = _longest(work)
    after = _longest(flat[order])
    better = (after < before * (1 - 1e-9)).any() and (after <= before * (1 + 1e-9)).all()
    return order if better else np.arange(flat.size).reshape(work.shape)


def imbalance(work: Work) -> tuple[float, float]:
    """Return the work of the longest microbatch and of the longest rank, each over the mean; `work`
    is as in `balanced_order`.
    """
    mean = float(work.sum(2).mean())
    microbatch, rank = _longest(work).tolist()
    return (microbatch / mean, rank / (mean * work.shape[1])) if mean else (1.0, 1.0)


def _longest(work: Work) -> Work:
    return np.array([work.sum(2).max(), work.sum((1, 2)).max()])


def _longest_first(work: Work, groups: int) -> Ints:
    """Return the members of each group, int64 [groups, len(work) / groups]: the largest member goes
    first, and each goes to the least loaded group with room.
    """
    room = len(work) // groups
    members: list[list[int]] = [[] for _ in range(groups)]
    load = np.zeros(groups)
    for item in np.argsort(-work, kind="stable").tolist():
        group = int(load.argmin())
        members[group].append(item)
        load[group] += work[item] if len(members[group]) < room else np.inf
    return np.array(members)
