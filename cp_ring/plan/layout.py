"""Layouts: which rank holds which tokens of the stream.

To add a layout, write one function from a mask and a number of ranks to a `Layout`, and enter it in
`LAYOUTS` under the name that users give:

    def striped(mask: Mask, cp: int) -> Layout:
        edges = np.arange(mask.n + 1)  # chunks of one token
        return Layout(mask.n, cp, edges, edges[:-1] % cp, "striped")

    LAYOUTS["striped"] = NamedLayout(striped)

Flags and settings take their choices from `LAYOUTS`, so the entry must be made before they are
read. Any chunks and any owners are right for attention; `Layout` says what the arrays must hold,
and the layout's plans must pass `Plan.build(mask, layout).verify(rank_plans=True)`. Training needs
equal tokens on all ranks besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cp_ring.errors import PlanError, expect
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import (
    Integers,
    Ints,
    check_all,
    digest,
    integer,
    offsets,
    runs,
    size_within,
    starts_of,
    stream_length,
)

if TYPE_CHECKING:
    import torch

    from cp_ring.plan.balance import Layers

MAX_RANKS = 1 << 20


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rank holds which of `n` tokens: the stream is cut into chunks, and each of `cp` ranks
    owns some of them and holds them in ascending order.

        layout = Layout.zigzag(n=8192, cp=4)

    edges: int64 [chunks + 1], from 0 up to `n`; chunk c is the tokens `[edges[c], edges[c + 1])`,
    at least one.
    owner: int64 [chunks], the rank that holds each chunk.
    rows: how many batch rows the stream holds, one after another.
    """

    n: int
    cp: int
    edges: Ints
    owner: Ints
    name: str = "layout"
    rows: int = 1

    @classmethod
    def zigzag(cls, n: int, cp: int) -> Layout:
        """2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r, so that causal work is equal
        (Megatron's split).

            layout = Layout.zigzag(n=8192, cp=4)

        A causal mask of 8 chunks on 4 ranks, one line for each chunk of queries: `#` is a chunk of
        keys that all of them see, `+` the chunk on the diagonal, of which they see half. Work is in
        chunk pairs.

                    contiguous                            zigzag
                keys  0 1 2 3 4 5 6 7  work           keys  0 1 2 3 4 5 6 7  work
            rank 0  q0  + . . . . . . .           rank 0  q0  + . . . . . . .
                    q1  # + . . . . . .   2.0             q7  # # # # # # # +   8.0
            rank 1  q2  # # + . . . . .           rank 1  q1  # + . . . . . .
                    q3  # # # + . . . .   6.0             q6  # # # # # # + .   8.0
            rank 2  q4  # # # # + . . .           rank 2  q2  # # + . . . . .
                    q5  # # # # # + . .  10.0             q5  # # # # # + . .   8.0
            rank 3  q6  # # # # # # + .           rank 3  q3  # # # + . . . .
                    q7  # # # # # # # +  14.0             q4  # # # # + . . .   8.0

        All ranks wait for the slowest: rank 3 of the contiguous layout works 1.75 times the mean
        (nearly 2 times on many ranks), and the zigzag ranks work alike. Chunks differ by one token
        where 2 * cp does not divide `n`. Raises `PlanError` if there are fewer tokens than chunks.
        """
        return cls._even(n, cp, _there_and_back(cp), "zigzag")

    @classmethod
    def contiguous(cls, n: int, cp: int) -> Layout:
        """One chunk for each rank, in order. Raises `PlanError` if there are fewer tokens than
        ranks.

            layout = Layout.contiguous(n=8192, cp=4)
        """
        return cls._even(n, cp, np.arange(_size(cp)), "contiguous")

    @classmethod
    def batch(cls, rows: Sequence[Layout]) -> Layout:
        """Batch rows, each split by its own layout, as one stream: row after row.

            layout = Layout.batch([Layout.zigzag(4096, 4), Layout.zigzag(4096, 4)])

        Tensors are [b, s, ...], so each rank must hold equally many tokens of every row. Raises
        `PlanError` if not.
        """
        if not rows:
            raise PlanError("a batch must have at least one row")
        for one in rows:
            expect("a batch row", one, Layout)
        if any(not np.array_equal(row.tokens_per_rank, rows[0].tokens_per_rank) for row in rows):
            held = "; ".join(", ".join(map(str, row.tokens_per_rank[:8])) for row in rows[:4])
            raise PlanError(
                f"batch rows must be split over the same ranks, as many tokens each; here {held}"
            )
        starts = np.cumsum([0, *(row.n for row in rows)])
        edges = np.concatenate(
            [row.edges[:-1] + start for row, start in zip(rows, starts, strict=False)]
        )
        owner = np.concatenate([row.owner for row in rows])
        return cls(
            int(starts[-1]), rows[0].cp, np.append(edges, starts[-1]), owner, "batch", len(rows)
        )

    @classmethod
    def per_document_zigzag(cls, cu_seqlens_padded: Integers, cp: int) -> Layout:
        """Zigzag within every document, as TransformerEngine splits packed (thd) sequences.

            layout = Layout.per_document_zigzag([0, 16, 40], cp=2)

        `cu_seqlens_padded` are offsets of documents, from 0 to the number of tokens. Raises
        `PlanError` if a document is not a multiple of 2 * cp tokens long.
        """
        cp, edges = _size(cp), offsets(cu_seqlens_padded, "cu_seqlens_padded")
        length, n = np.diff(edges), int(edges[-1])
        if not n:
            raise PlanError("cu_seqlens_padded ends at 0: it must hold at least one token")
        check_all(
            length % (2 * cp) == 0,
            lambda i: (
                f"document {i} has {length[i]} tokens, not a multiple of 2 * cp = {2 * cp}: pad it"
            ),
        )
        start, length = edges[:-1][length > 0], length[length > 0]
        chunks = (start[:, None] + length[:, None] // (2 * cp) * np.arange(2 * cp)).reshape(-1)
        owner = np.tile(_there_and_back(cp), len(start))
        return cls(n, cp, np.append(chunks, n), owner, "per_document_zigzag")

    @classmethod
    def balanced(cls, masks: Mask | Sequence[tuple[Mask, int]], cp: int) -> Layout:
        """Equal tokens and nearly equal work for `masks` on all ranks, with the least predicted
        time.

            layout = Layout.balanced(Mask.documents([0, 3000, 8192]), cp=4)

        `masks` is the mask of all layers, or a list of (mask, number of layers that have it):
        tokens stay where they are from layer to layer, so the sum of the work of all layers is
        balanced. Token counts differ by one if cp does not divide n. Maximum / mean work is at most
        1.05 where possible, and more where links between nodes make that much slower. The result
        may be zigzag or contiguous. It is deterministic, so ranks find the same layout without
        communication. Raises `PlanError` if there are fewer tokens than ranks, and for masks of
        different lengths or numbers of layers below 1.
        """
        from cp_ring.plan.balance import balanced_layout

        return balanced_layout(_layers(masks), _size(cp))

    @classmethod
    def _even(cls, n: int, cp: int, owner: Ints, name: str) -> Layout:
        n, cp = stream_length(n), _size(cp)
        owner = owner[: n if cp == 1 else None]  # a rank alone may have one token
        if n < len(owner):
            raise PlanError(
                f"{name} layout cuts the sequence into {len(owner)} chunks for cp {cp}, but it has "
                f"{n} tokens"
            )
        return cls(n, cp, np.arange(len(owner) + 1) * n // len(owner), owner, name)

    def merged(self, size: int) -> Layout:
        """The layout of `cp / size` members, each of which holds the tokens of `size` neighboring
        ranks in ascending order.

            members = Layout.zigzag(8192, 8).merged(2)  # 4 members of 2 ranks

        Neighboring chunks of a member are joined, so a zigzag layout gives a zigzag layout. Raises
        `PlanError` if `size` does not divide the ranks.
        """
        if integer(size, "heads") < 1 or self.cp % size:
            raise PlanError(f"heads={size}: it must divide the {self.cp} context-parallel ranks")
        member = self.owner // size
        first = runs(member[1:] != member[:-1], len(member))[0]
        edges = np.append(self.edges[first], self.n)
        return replace(self, cp=self.cp // size, edges=edges, owner=member[first])

    @cached_property
    def digest(self) -> str:
        """A string that is equal for layouts of equal chunks and owners, whatever their names."""
        sizes = f"{self.n} {self.cp} {self.rows} {len(self.owner)} "
        return digest(sizes.encode(), self.edges.tobytes(), self.owner.tobytes())

    @cached_property
    def order(self) -> Ints:
        """The chunks in the order of the axis on which the shards of all ranks lie end to end,
        int64 [chunks].
        """
        return np.argsort(self.owner, kind="stable")

    @cached_property
    def axis(self) -> Ints:
        """Where the chunks of `order` begin on that axis, and its end, int64 [chunks + 1]."""
        return np.append(0, np.cumsum(np.diff(self.edges)[self.order]))

    @cached_property
    def first(self) -> Ints:
        """Where the shard of each rank begins on that axis, int64 [cp]."""
        return starts_of(self.tokens_per_rank)

    @cached_property
    def starts(self) -> Ints:
        """The token of its owner's shard at which each chunk begins, int64 [chunks]."""
        starts = np.empty_like(self.owner)
        starts[self.order] = self.axis[:-1] - self.first[self.owner[self.order]]
        return starts

    @cached_property
    def tokens_per_rank(self) -> Ints:
        """The number of tokens that each rank holds, int64 [cp]."""
        return np.bincount(self.owner, np.diff(self.edges), self.cp).astype(np.int64)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The token ranges [start, end) of a rank, ascending, with neighbors joined. Raises
        `PlanError` if there is no such rank.
        """
        check_rank(rank, self.cp)
        chunk = np.flatnonzero(self.owner == rank)
        first, last = runs(np.diff(chunk) != 1, len(chunk))
        starts, ends = self.edges[chunk[first]], self.edges[chunk[last] + 1]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def positions(self, rank: int) -> Ints:
        """The stream positions of the rank's tokens, ascending, int64 [tokens of the rank].

            positions = layout.positions(rank=0)

        Raises `PlanError` if there is no such rank.
        """
        return np.concatenate([self.edges[:0], *(np.arange(*ends) for ends in self.ranges(rank))])

    def shard(self, x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """The rank's part of a whole tensor along `dim`. Raises `PlanError` if `dim` does not hold
        `n` tokens.

            part = layout.shard(x, rank=0, dim=1)
        """
        dim = dimension(dim, x)
        if x.shape[dim] != self.n:
            raise PlanError(
                f"tensor of {x.shape[dim]} tokens in dimension {dim}, but the layout is for "
                f"{self.n}"
            )
        import torch

        return torch.cat(
            [x.narrow(dim, start, end - start) for start, end in self.ranges(rank) or [(0, 0)]], dim
        )

    def unshard(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole tensor from the parts of all ranks in their order: the inverse of `shard`.

            whole = layout.unshard([layout.shard(x, rank, 1) for rank in range(layout.cp)], dim=1)

        Raises `PlanError` if the parts differ in size from `tokens_per_rank` along `dim`.
        """
        import torch

        dim = dimension(dim, *parts)
        sizes = [part.shape[dim] for part in parts]
        if sizes != self.tokens_per_rank.tolist():
            raise PlanError(
                f"parts of {sizes} tokens, but the layout gives {self.tokens_per_rank.tolist()}"
            )
        chunks = zip(
            self.owner.tolist(), self.starts.tolist(), np.diff(self.edges).tolist(), strict=True
        )
        return torch.cat([parts[rank].narrow(dim, *place) for rank, *place in chunks], dim)

    def __repr__(self) -> str:
        return f"Layout.{self.name}(n={self.n}, cp={self.cp}, chunks={len(self.owner)})"


def _size(cp: int) -> int:
    return size_within(
        cp, "context parallel size", MAX_RANKS, f"context parallel size {cp} must be"
    )


def _there_and_back(cp: int) -> Ints:
    """Return the owners of zigzag chunks: all ranks, then all in descending order."""
    ranks = np.arange(_size(cp))
    return np.concatenate([ranks, ranks[::-1]])


def _layers(masks: Mask | Sequence[tuple[Mask, int]]) -> Layers:
    layers = (
        [(masks, 1)] if isinstance(masks, Mask) else list(expect("masks", masks, Mask, Iterable))
    )
    for layer in layers:
        if not (isinstance(layer, Sequence) and len(layer) == 2 and isinstance(layer[0], Mask)):
            raise PlanError(f"{layer!r} is not a pair (mask, number of layers)")
        mask, count = layer
        if integer(count, "number of layers") < 1:
            raise PlanError(
                f"{count} layers have the mask {mask.describe()!r}: it must be at least 1"
            )
    if not layers:
        raise PlanError("a balanced layout needs at least one mask")
    lengths = {mask.n for mask, _ in layers}
    if len(lengths) > 1:
        raise PlanError(
            f"the masks of the layers are for {', '.join(map(str, sorted(lengths)))} tokens: they "
            "must have one length"
        )
    return layers


def dimension(dim: int, *tensors: torch.Tensor) -> int:
    """Return `dim` as an int. Raises `PlanError` if one of the tensors has no such dimension."""
    for x in tensors:
        if not -x.dim() <= integer(dim, "dim") < x.dim():
            raise PlanError(f"dim={dim}: the tensor has {x.dim()} dimensions, {tuple(x.shape)}")
    return int(dim)


def check_rank(rank: int, cp: int) -> None:
    """Raise `PlanError` unless `rank` is one of `cp` ranks: Python would count -1 from the end."""
    if not 0 <= integer(rank, "rank") < cp:
        raise PlanError(f"there is no rank {rank} among the {cp} of the layout, 0 to {cp - 1}")


@dataclass(frozen=True)
class NamedLayout:
    """A layout with a name: `make` gives the `Layout` of a mask over a number of ranks.

    stock: True for Megatron's own split.
    fixed: True if the layout follows from the number of tokens alone.
    chunks: the number of tokens of a rank must be a multiple of this.
    weighs: True if `make` also takes the masks of all layers, as `Layout.balanced` does, so that
    the split depends on the documents or the mask of a batch.
    """

    make: Callable[[Any, int], Layout]
    stock: bool = False
    fixed: bool = False
    chunks: int = 1
    weighs: bool = False

    def of_layers(self, layers: Sequence[tuple[Mask, int]], cp: int) -> Layout:
        """Return the layout of a model's layers, given as (mask, number of layers that have it)."""
        if cp == 1:
            return Layout.contiguous(layers[0][0].n, 1)
        return self.make(layers if self.weighs else layers[0][0], cp)


LAYOUTS: dict[str, NamedLayout] = {
    "zigzag": NamedLayout(
        lambda mask, cp: Layout.zigzag(mask.n, cp), stock=True, fixed=True, chunks=2
    ),
    "contiguous": NamedLayout(lambda mask, cp: Layout.contiguous(mask.n, cp), fixed=True),
    "balanced": NamedLayout(Layout.balanced, weighs=True),
}
"""Layouts that flags and settings can name."""
