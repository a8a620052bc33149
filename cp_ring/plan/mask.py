"""Masks: for each query of a token stream, the one interval of keys that it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, integer, integers, sort_index
from cp_ring.plan.tiles import OPEN, Tile, Tiles


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query of a stream of `n` tokens may see, as disjoint `pieces` in token positions."""

    n: int
    pieces: Tiles
    name: str = "mask"

    @classmethod
    def full(cls, n: int, window: tuple[int, int] = (-1, -1)) -> Mask:
        """Every query sees every key, or the keys from i - left to i + right; -1 leaves a side open (as flash-attn does)."""
        return cls.documents([0, integer(n, "n")], causal=False, window=window, name="full")

    @classmethod
    def causal(cls, n: int, window: tuple[int, int] = (-1, 0)) -> Mask:
        """Query i sees keys up to i, and with a window no further back than i - left."""
        return cls.documents([0, integer(n, "n")], causal=True, window=window, name="causal")

    @classmethod
    def documents(
        cls,
        cu_seqlens: Sequence[int] | np.ndarray,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        n: int | None = None,
        name: str = "documents",
    ) -> Mask:
        """Packed documents `[cu_seqlens[i], cu_seqlens[i + 1])` that do not see one another.

        `n` is the length of the stream, by default the end of the last document; tokens behind it are padding that sees
        nothing and is seen by nobody. Empty documents are ignored. Raises `PlanError` on offsets that do not start at 0,
        decrease or pass `n`, and on windows below -1.
        """
        start, end, n = _spans(cu_seqlens, n)
        left, right = _band(window if window is not None else (-1, 0 if causal else -1))
        lo, hi = np.full_like(start, left), np.full_like(start, min(right, 0) if causal else right)
        return cls(n, Tiles(np.stack([start, end, start, end, lo, hi])).trimmed(), name)

    @classmethod
    def prefix(
        cls,
        n: int,
        lengths: int | Sequence[int] | np.ndarray,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
        window: tuple[int, int] = (-1, 0),
    ) -> Mask:
        """As `documents`, but every query of a document sees the whole of its prefix that the window's left side leaves it.

        Query i sees keys from i - left to max(i + right, last token of the prefix). `lengths` are the prefixes of the
        documents, one each or one for all; `cu_seqlens` is by default one document of `n` tokens. Raises `PlanError` as
        `documents` does, and where a prefix is below 0 or longer than its document.
        """
        start, end, n = _spans([0, integer(n, "n")] if cu_seqlens is None else cu_seqlens, n)
        bounds = (*_band(window), OPEN)
        given = integers(lengths, "prefix lengths")
        if given.ndim and given.shape != start.shape:
            raise PlanError(f"{given.size} prefix lengths for {len(start)} documents")
        bad = np.flatnonzero((given < 0) | (given > end - start))
        if len(bad):
            length = np.broadcast_to(given, start.shape)[bad[0]]
            raise PlanError(f"document {bad[0]} of {end[bad[0]] - start[bad[0]]} tokens has a prefix of {length}")
        # Up to row `turn` the prefix ends further right than the window, from there on the window does.
        stop, lo, hi, open_ = start + given, *(np.full_like(start, bound) for bound in bounds)
        turn = np.maximum(stop - hi, start)
        early = np.stack([start, turn, start, stop, lo, open_])
        late = np.stack([turn, end, start, end, lo, hi])
        pieces = Tiles(np.concatenate([early, late], axis=1)).trimmed()
        return cls(n, pieces[sort_index(pieces.q0)], "prefix")

    def allowed(self, i: int, j: int) -> bool:
        """Whether query i may see key j."""
        if not (0 <= i < self.n and 0 <= j < self.n):
            raise PlanError(f"pair ({i}, {j}) is outside the {self.n} tokens of the mask")
        p = self.pieces
        return bool(np.any((p.q0 <= i) & (i < p.q1) & (p.k0 <= j) & (j < p.k1) & (p.lo <= j - i) & (j - i <= p.hi)))

    @classmethod
    def batch(cls, rows: Sequence[Mask]) -> Mask:
        """Batch rows with masks of their own as one stream, in which row follows row."""
        if not rows:
            raise PlanError("a batch has at least one row")
        starts = np.cumsum([0, *(row.n for row in rows)])
        pieces = [row.pieces.shifted(start, start).data for row, start in zip(rows, starts, strict=False)]
        return cls(int(starts[-1]), Tiles(np.concatenate(pieces, axis=1)), "batch")

    def area(self) -> int:
        """Allowed (query, key) pairs, exactly."""
        return int(self.pieces.area().sum())

    def dense(self) -> np.ndarray:
        """The mask as a boolean `[n, n]` array, for small n."""
        return paint(self.pieces, self.n, self.n) > 0

    def __repr__(self) -> str:
        return f"Mask.{self.name}(n={self.n}, pieces={len(self.pieces)})"


def paint(tiles: Tiles | Sequence[Tile], rows: int, columns: int) -> np.ndarray:
    """How many tiles allow each pair of a small score matrix: int64 `[rows, columns]`."""
    picture = np.zeros((rows, columns), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in tiles:
        offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        picture[q0:q1, k0:k1] += (offset >= lo) & (offset <= hi)
    return picture


def _spans(cu_seqlens: Sequence[int] | np.ndarray, n: int | None) -> tuple[Ints, Ints, int]:
    """Checked starts and ends of documents, and the length of the stream."""
    edges = integers(cu_seqlens, "cu_seqlens")
    if edges.ndim != 1 or len(edges) < 1 or edges[0] != 0 or (np.diff(edges) < 0).any():
        raise PlanError(f"cu_seqlens must start at 0 and not decrease, not {_short(edges)}")
    n = int(edges[-1]) if n is None else integer(n, "a stream of n =")
    if n < 1:
        raise PlanError(f"a stream of {n} tokens: it must hold at least 1")
    if edges[-1] > n:
        raise PlanError(f"cu_seqlens ends at {edges[-1]}, past the {n} tokens of the stream")
    return edges[:-1], edges[1:], n


def _band(window: tuple[int, int]) -> tuple[int, int]:
    """A window (left, right) as bounds on key - query."""
    try:
        left, right = (integer(side, "window side") for side in window)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, PlanError) else PlanError(f"window {window!r}: it is a pair (left, right)") from None
    if left < -1 or right < -1:
        raise PlanError(f"window ({left}, {right}): each side must be -1 (open) or at least 0")
    return -OPEN if left < 0 else -left, OPEN if right < 0 else right


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, edgeitems=3)
