"""Masks: for each query of a token stream, the one interval of keys that it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.tiles import OPEN, Tile, Tiles


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query of a stream of `n` tokens may see, as disjoint `pieces` in token positions."""

    n: int
    pieces: Tiles
    name: str = field(default="mask")

    @classmethod
    def full(cls, n: int, window: tuple[int, int] = (-1, -1)) -> Mask:
        """Every query sees every key, or the keys from i - left to i + right; -1 leaves a side open (as flash-attn does)."""
        return cls.documents(np.array([0, n]), causal=False, window=window, n=n, name="full")

    @classmethod
    def causal(cls, n: int, window: tuple[int, int] = (-1, 0)) -> Mask:
        """Query i sees keys up to i, and with a window no further back than i - left."""
        return cls.documents(np.array([0, n]), causal=True, window=window, n=n, name="causal")

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
        edges = np.asarray(cu_seqlens, dtype=np.int64)
        left, right = window if window is not None else (-1, 0 if causal else -1)
        if left < -1 or right < -1:
            raise PlanError(f"window ({left}, {right}): each side must be -1 (open) or at least 0")
        if edges.ndim != 1 or len(edges) < 1 or edges[0] != 0 or (np.diff(edges) < 0).any():
            raise PlanError(f"cu_seqlens must start at 0 and not decrease, not {_short(edges)}")
        n = int(edges[-1]) if n is None else int(n)
        if edges[-1] > n:
            raise PlanError(f"cu_seqlens ends at {edges[-1]}, past the {n} tokens of the stream")
        start, end = edges[:-1], edges[1:]
        lo = np.full(len(start), -OPEN if left < 0 else -left)
        hi = np.full(len(start), min(0, OPEN if right < 0 else right) if causal else (OPEN if right < 0 else right))
        return cls(n, Tiles(np.stack([start, end, start, end, lo, hi])).trimmed(), name)

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


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, edgeitems=3)
