"""Masks: for each query of a token stream, the interval of keys that it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints, integer, integers, sort_index
from cp_ring.plan.tiles import OPEN, Tile, Tiles

MAX_DESCRIBED = 4
"""`Mask.describe` names up to this many different masks of batch rows."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query of a stream of `n` tokens may see, as disjoint `pieces` in token positions.

    `name` is the constructor, `details` is what `describe` says beside it.
    """

    n: int
    pieces: Tiles
    name: str = "mask"
    details: str = ""

    @classmethod
    def full(cls, n: int, window: tuple[int, int] = (-1, -1)) -> Mask:
        """Every query sees every key, or the keys from i - left to i + right; -1 leaves a side open (as flash-attn does)."""
        mask = cls.documents([0, integer(n, "n")], causal=False, window=window)
        return replace(mask, name="full", details=_window_in_words(window, causal=False))

    @classmethod
    def causal(cls, n: int, window: tuple[int, int] = (-1, 0)) -> Mask:
        """Query i sees keys up to i, and with a window no further back than i - left."""
        mask = cls.documents([0, integer(n, "n")], causal=True, window=window)
        return replace(mask, name="causal", details=_window_in_words(window, causal=True))

    @classmethod
    def documents(
        cls,
        cu_seqlens: Sequence[int] | np.ndarray,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        n: int | None = None,
    ) -> Mask:
        """Packed documents `[cu_seqlens[i], cu_seqlens[i + 1])` that do not see one another.

        `n` is the length of the stream, by default the end of the last document. Tokens behind the last document are
        padding: they see nothing, and nothing sees them. Empty documents are ignored. Raises `PlanError` for offsets
        that do not start at 0, decrease or pass `n`, and for windows below -1.
        """
        start, end, n = _spans(cu_seqlens, n)
        window = window if window is not None else (-1, 0 if causal else -1)
        left, right = _band(window)
        lo, hi = np.full_like(start, left), np.full_like(start, min(right, 0) if causal else right)
        details = [_documents_in_words(start, end, n), "" if causal else "not causal", _window_in_words(window, causal)]
        pieces = Tiles(np.stack([start, end, start, end, lo, hi])).trimmed()
        return cls(n, pieces, "documents", ", ".join(filter(None, details)))

    @classmethod
    def prefix(
        cls,
        n: int,
        lengths: int | Sequence[int] | np.ndarray,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
        window: tuple[int, int] = (-1, 0),
    ) -> Mask:
        """As `documents`, but every query also sees the prefix of its document, as far back as the window's left side.

        Query i sees keys from i - left to max(i + right, last token of the prefix). `lengths` are the lengths of the
        prefixes, one for each document or one for all; `cu_seqlens` is by default one document of `n` tokens. Raises
        `PlanError` as `documents` does, and for a prefix that is below 0 or longer than its document.
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
        # Before query `turn` the prefix ends further right than the window, from there on the window does.
        stop, lo, hi, open_ = start + given, *(np.full_like(start, bound) for bound in bounds)
        turn = np.maximum(stop - hi, start)
        early = np.stack([start, turn, start, stop, lo, open_])
        late = np.stack([turn, end, start, end, lo, hi])
        pieces = Tiles(np.concatenate([early, late], axis=1)).trimmed()
        prefixes = f"{'mean ' * (given.size > 1)}{given.sum() / max(given.size, 1):.0f} tokens"
        documents = f"documents: {_documents_in_words(start, end, n)}" if cu_seqlens is not None else ""
        details = [prefixes, documents, _window_in_words(window, causal=window[1] == 0)]
        return cls(n, pieces[sort_index(pieces.q0)], "prefix", ", ".join(filter(None, details)))

    def allowed(self, i: int, j: int) -> bool:
        """Whether query i may see key j."""
        if not (0 <= i < self.n and 0 <= j < self.n):
            raise PlanError(f"pair ({i}, {j}) is outside the {self.n} tokens of the mask")
        p = self.pieces
        return bool(np.any((p.q0 <= i) & (i < p.q1) & (p.k0 <= j) & (j < p.k1) & (p.lo <= j - i) & (j - i <= p.hi)))

    @classmethod
    def batch(cls, rows: Sequence[Mask]) -> Mask:
        """Batch rows, each with its own mask, as one stream: row after row."""
        if not rows:
            raise PlanError("a batch must have at least one row")
        starts = np.cumsum([0, *(row.n for row in rows)])
        pieces = [row.pieces.shifted(start, start).data for row, start in zip(rows, starts, strict=False)]
        masks = list(dict.fromkeys(row.describe() for row in rows))
        words = "; ".join([*masks[:MAX_DESCRIBED], *(["..."] if len(masks) > MAX_DESCRIBED else [])])
        return cls(int(starts[-1]), Tiles(np.concatenate(pieces, axis=1)), "batch", f"{len(rows)} rows ({words})")

    def area(self) -> int:
        """Allowed (query, key) pairs, exactly."""
        return int(self.pieces.area().sum())

    def dense(self) -> np.ndarray:
        """The mask as a boolean `[n, n]` array, for small n."""
        return paint(self.pieces, self.n, self.n) > 0

    def describe(self) -> str:
        """The mask in words, as "causal, window 4096" or "documents: 113, mean 580 tokens"."""
        separator = ": " if self.name in ("documents", "prefix", "batch") else ", "
        return self.name + separator * bool(self.details) + self.details

    def __repr__(self) -> str:
        return f"<Mask of {self.n} tokens, {self.describe()}>"


def paint(tiles: Tiles | Sequence[Tile], queries: int, keys: int) -> np.ndarray:
    """How many tiles allow each pair of a small score matrix: int64 `[queries, keys]`."""
    picture = np.zeros((queries, keys), dtype=np.int64)
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


def _window_in_words(window: tuple[int, int], causal: bool) -> str:
    """A checked window (left, right); "" where it hides nothing. A causal mask has no keys on the right."""
    left, right = (int(side) for side in window)
    if causal:
        return f"window {left}" if left >= 0 else ""
    if left == right:
        return f"window {left} on both sides" if left >= 0 else ""
    before, after = (str(side) if side >= 0 else "all" for side in (left, right))
    return f"window {before} before, {after} after"


def _documents_in_words(start: Ints, end: Ints, n: int) -> str:
    """How many documents hold a token, how many tokens on average, and the padding behind them."""
    count, total = int((end > start).sum()), int((end - start).sum())
    padding = f", {n - total} tokens of padding" if n > total else ""
    return f"{count}, mean {total / max(count, 1):.0f} tokens{padding}"


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, edgeitems=3)
