"""The table of a mask: disjoint pieces, each a rectangle of the score matrix cut by a diagonal
band, and everything that follows from the table alone.

The constructors of masks are in `cp_ring.plan.mask.Mask`. Nothing here knows which one made a
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.plan.proof import overlapping
from cp_ring.plan.ranges import (
    MAX_TOKENS,
    Integers,
    Ints,
    check_all,
    digest,
    expand,
    integer,
    integers,
    runs,
    sort_index,
    stream_length,
    window_of,
)
from cp_ring.plan.tiles import (
    OPEN,
    Tiles,
    coalesce,
    paint,
    split_at_edges,
)

ONE_RUN = np.zeros((2, 1), np.int64)
"""The segments of a stream whose positions are places."""


@dataclass(frozen=True, eq=False)
class MaskTable:
    """Which keys each query of a stream of `n` tokens may see, as disjoint `pieces` in token
    positions. Queries and keys are those of the same tokens.

    `name` is the constructor. `segments` are the runs of tokens whose positions go up by one: int64
    [2, count], the first token of each run and its position; the first run begins at token 0. By
    default it is the only one, so that every token's position is its place in the stream.
    """

    n: int
    pieces: Tiles
    name: str = "mask"
    segments: Ints = field(default_factory=lambda: ONE_RUN)

    @classmethod
    def from_pieces(
        cls,
        n: int,
        pieces: Iterable[Sequence[int]],
        name: str = "mask",
        positions: Integers | None = None,
    ) -> Self:
        """A mask of `n` tokens from pieces (q0, q1, k0, k1) or (q0, q1, k0, k1, lo, hi), which must
        not overlap.

            mask = Mask.from_pieces(10, [(0, 10, 0, 4), (4, 10, 4, 10)])

        Queries q0 <= q < q1 see the keys k0 <= k < k1 for which lo <= k - q <= hi. Without lo and
        hi they see all these keys; with lo > hi they see none. `positions`, int64 [n], are those of
        `Mask.positions`. Raises `PlanError` for a piece that is outside of the stream or ends
        before it begins, and for two pieces that overlap.
        """
        n, tiles = stream_length(n), _read(pieces)
        check_all(
            (tiles.q0 <= tiles.q1) & (tiles.k0 <= tiles.k1),
            lambda i: f"piece {i} {_numbers(tiles, i)} ends before it begins",
        )
        check_all(
            (np.minimum(tiles.q0, tiles.k0) >= 0) & (np.maximum(tiles.q1, tiles.k1) <= n),
            lambda i: f"piece {i} {_numbers(tiles, i)} is outside the {n} tokens of the mask",
        )
        fitted, live = tiles.fitted().living(np.arange(len(tiles)))
        if (clash := overlapping(fitted.data)) is not None:
            one, other = live[[*clash]].tolist()
            raise PlanError(
                f"pieces {one} {_numbers(tiles, one)} and {other} {_numbers(tiles, other)} "
                "overlap; Mask.union joins masks that overlap"
            )
        segments = ONE_RUN if positions is None else _runs_of(positions, n)
        return cls(n, fitted, name, segments)

    @classmethod
    def union(cls, *masks: Self) -> Self:
        """The mask of the pairs that at least one of the `masks` allows; they may overlap.
        Positions are those of the first mask.

            mask = Mask.union(Mask.causal(64), Mask.from_pieces(64, [(8, 24, 8, 24)]))

        Raises `PlanError` if there is no mask, or if masks differ in length.
        """
        if not masks:
            raise PlanError("a union must have at least one mask")
        if isinstance(masks[0], Sequence):
            raise ConfigError("a list of masks: give them one by one, as in Mask.union(a, b)")
        first = _all_masks(masks)[0]
        n = first.n
        if any(mask.n != n for mask in masks):
            sizes = ", ".join(f"{mask.n} tokens" for mask in masks)
            raise PlanError(f"a union of masks of {sizes}: they must have one length")
        pieces = Tiles.concatenate(*(mask.pieces for mask in masks)).trimmed()
        if len(pieces):
            from cp_ring.plan.union import joined

            pieces = joined(pieces)
        return replace(first, pieces=pieces, name="union")

    def __or__(self, other: Self) -> Self:
        """Return `union` of this mask and another one."""
        return type(self).union(self, other)

    def __and__(self, window: tuple[int, int]) -> Self:
        """The mask of the pairs that this mask allows and whose positions are within `window`
        (left, right); -1 leaves a side open.

            mask = Mask.documents([0, 4096, 8192]) & (1024, 0)

        Distances are between `positions`: a response sees the last tokens of its prompt, however
        many responses lie between them in the stream.
        """
        left, right = band_of(window)
        start, position = self.segments
        edges, slide = np.append(start, self.n), position - start
        pieces, query, key = split_at_edges(self.pieces, edges, edges)
        data = pieces.data
        # Between two runs the distance of positions is that in the stream plus a constant.
        more = slide[key] - slide[query]
        if left != -OPEN:
            np.maximum(data[4], left - more, out=data[4])
        if right != OPEN:
            np.minimum(data[5], right - more, out=data[5])
        narrow = Tiles(data).trimmed()
        return replace(self, pieces=coalesce(narrow, np.zeros(len(narrow), np.int64))[0])

    @classmethod
    def batch(cls, rows: Sequence[Self]) -> Self:
        """Batch rows, each with its own mask, as one stream: row after row.

            mask = Mask.batch([Mask.causal(4096), Mask.full(4096)])

        Raises `PlanError` if there is no batch row.
        """
        if not _all_masks(rows):
            raise PlanError("a batch must have at least one row")
        starts = np.cumsum([0, *(row.n for row in rows)]).tolist()
        masks = list(zip(rows, starts, strict=False))
        tiles = Tiles.concatenate(*(mask.pieces.shifted(start, start) for mask, start in masks))
        runs = [np.add(mask.segments, [[start], [0]]) for mask, start in masks]
        return cls(stream_length(starts[-1]), tiles, "batch", np.concatenate(runs, axis=1))

    @cached_property
    def digest(self) -> str:
        """A string that is equal for masks with the same positions and pieces, in any order and
        whatever their names. A mask whose pieces are cut in other ways may have another.
        """
        start, position = self.segments
        breaks = np.append(True, np.diff(position - start) != 0)
        runs = np.stack([start, position])[:, breaks]
        pieces = self.pieces.trimmed()
        pieces = pieces[sort_index(pieces.q0, pieces.k0)]
        return digest(f"{self.n} ".encode(), pieces.data.tobytes(), runs.tobytes())

    @property
    def positions(self) -> Ints:
        """The position of each token in its own sequence, for rotary and learned embeddings: int64
        [n].

        Documents and groups begin at 0, responses continue from their prompt, branches from their
        parent. In a mask without such parts the position is the place in the stream.
        """
        start, position = self.segments
        return np.arange(self.n) + np.repeat(position - start, np.diff(np.append(start, self.n)))

    @property
    def last(self) -> NDArray[np.bool_]:
        """bool [n]: True for tokens without a next token: at the end of a run of positions, or not
        seen by the next token. Padding has no next token.
        """
        data = self.pieces.data.copy()
        np.maximum(data[4], -1, out=data[4])
        np.minimum(data[5], -1, out=data[5])
        seen, last = Tiles(data).trimmed(), np.ones(self.n, bool)
        last[expand(seen.k0, seen.k1 - seen.k0)[1]] = False
        last[self.segments[0][1:] - 1] = True
        return last

    def allowed(self, i: int, j: int) -> bool:
        """Return True if query i may see key j."""
        if not (0 <= integer(i, "query") < self.n and 0 <= integer(j, "key") < self.n):
            raise PlanError(f"pair ({i}, {j}) is outside the {self.n} tokens of the mask")
        return len(self.pieces.within(i, i + 1, j, j + 1).trimmed()) > 0

    def area(self) -> int:
        """Return the exact number of allowed (query, key) pairs."""
        return int(self.pieces.area().sum())

    def dense(self) -> np.ndarray:
        """Return the mask as a boolean `[n, n]` array, for small n."""
        return paint(self.pieces, self.n, self.n) > 0

    def describe(self) -> str:
        """Describe the mask, as in "block causal, 2,080 pairs"."""
        return f"{self.name.replace('_', ' ')}, {self.area():,} pairs"

    def __repr__(self) -> str:
        return f"<Mask of {self.n} tokens, {self.describe()}>"


def _all_masks[T: MaskTable](masks: Sequence[T]) -> Sequence[T]:
    for mask in expect("masks", masks, Sequence):
        expect("mask", mask, MaskTable)
    return masks


def _runs_of(positions: Integers, n: int) -> Ints:
    """Return `Mask.segments` for the positions of all tokens."""
    values = integers(positions, "positions")
    if values.shape != (n,) or ((values < 0) | (values >= MAX_TOKENS)).any():
        raise PlanError(
            f"positions of shape {list(values.shape)} hold {values.min(initial=0)} to "
            f"{values.max(initial=0)}: give [{n}] numbers from 0 to below {MAX_TOKENS}"
        )
    start, _ = runs(np.diff(values) != 1, n)
    return np.stack([start, values[start]])


def segments_of(start: Ints, end: Ints, n: int, position: Ints | int = 0) -> Ints:
    """Return `Mask.segments` for runs [start, end) that lie end to end from token 0, each at
    `position`. The padding behind them begins at position 0.
    """
    runs = np.stack(np.broadcast_arrays(start, position))[:, start < end]
    total = int(end[-1]) if len(end) else 0
    padding = np.array([[total], [0]])[:, : int(total < n)]
    return np.concatenate([runs, padding], axis=1)


def band_of(window: tuple[int, int], causal: bool = False) -> tuple[int, int]:
    """Return a window (left, right) as bounds on key - query, of which `causal` hides later keys.
    Raises `PlanError` as `window_of` does.
    """
    left, right = window_of(window)
    return -OPEN if left < 0 else -left, 0 if causal else OPEN if right < 0 else right


def _read(pieces: Iterable[Sequence[int]]) -> Tiles:
    """Return pieces of 4 or 6 numbers as tiles; a bound of a band beyond `OPEN` becomes open.
    Raises `PlanError` for others.
    """
    whole: list[tuple[int, ...]] = []
    for i, piece in enumerate(_iterated(pieces, "pieces")):
        values = _iterated(piece, f"piece {i}")
        if len(values) not in (4, 6):
            raise PlanError(
                f"piece {i} has {len(values)} numbers: it must be (q0, q1, k0, k1) or (q0, q1, k0, "
                "k1, lo, hi)"
            )
        whole.append((*values, -OPEN, OPEN)[:6])
    return Tiles.of(whole)


def _iterated[T](values: Iterable[T], what: str) -> tuple[T, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise PlanError(f"{what} is {values!r}, not a list") from None


def _numbers(tiles: Tiles, i: int) -> tuple[int, ...]:
    """Return a piece as a person writes it: 4 numbers without a band, else 6."""
    values = tuple(tiles.data[:, i].tolist())
    return values[:4] if values[4:] == (-OPEN, OPEN) else values
