"""Masks: for each query of a token stream, the keys that it may see, as intervals.

A mask is a table of disjoint pieces, each a rectangle of the score matrix cut by a diagonal band. A
constructor is a function that makes such a table, and nothing else in cp_ring knows which one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cp_ring.errors import ConfigError, PlanError, expect, one_line
from cp_ring.plan.ranges import (
    MAX_TOKENS,
    Ints,
    check_all,
    digest,
    every_other,
    integer,
    integers,
    offsets,
    runs,
    short,
    size_within,
    sort_index,
    union,
)
from cp_ring.plan.tiles import (
    OPEN,
    Tile,
    Tiles,
    coalesce,
    first_overlap,
    joined,
    split_at_edges,
)
from cp_ring.runtime import Numbered

MAX_PIECES = 4096
"""Pieces of a mask that `Mask.from_dense` and `Mask.from_mask_mod` make, by default."""

MAX_DESCRIBED = 4
"""`Mask.describe` names up to this many different masks of batch rows."""


@dataclass(frozen=True, eq=False)
class Mask(Numbered):
    """Which keys each query of a stream of `n` tokens may see, as disjoint `pieces` in token
    positions.

    The keys are those of the same tokens, or of a stream of their own of `keys` tokens, as in cross
    attention and decoding: pieces then are queries of one stream by keys of the other.

    `name` is the constructor, `details` is what `describe` says beside it. `segments` are the runs
    of tokens whose positions go up by one: int64 [2, count], the first token of each run and its
    position; the first run begins at token 0. None is one run from position 0, so that every
    token's position is its place in the stream. `key_segments` are those of `keys`.
    """

    n: int
    pieces: Tiles
    name: str = "mask"
    details: str = ""
    segments: Ints | None = None
    keys: int | None = None
    key_segments: Ints | None = None

    @property
    def num_keys(self) -> int:
        """Tokens of the stream of keys."""
        return self.n if self.keys is None else self.keys

    @classmethod
    def from_pieces(
        cls,
        n: int,
        pieces: Iterable[Sequence[int]],
        name: str = "mask",
        details: str = "",
        positions: Sequence[int] | np.ndarray | None = None,
        keys: int | None = None,
    ) -> Mask:
        """A mask of `n` tokens from pieces (q0, q1, k0, k1) or (q0, q1, k0, k1, lo, hi), which must
        not overlap.

        Queries q0 <= q < q1 see the keys k0 <= k < k1 for which lo <= k - q <= hi; without lo and
        hi all of them, and none where lo > hi. `positions`, int64 [n], are those of
        `Mask.positions`. `keys` is the length of a stream of keys of their own. Raises `PlanError`
        that names the piece that is outside of the stream or ends before it begins, or the two
        pieces that overlap, with a pair that both have.
        """
        n, tiles = _length(n), _read(pieces)
        keys = None if keys is None else _length(keys, "keys")
        ends = (n, n if keys is None else keys)
        ends_early = (tiles.q0 > tiles.q1) | (tiles.k0 > tiles.k1)
        outside = np.minimum(tiles.q0, tiles.k0) < 0
        outside |= (tiles.q1 > ends[0]) | (tiles.k1 > ends[1])
        for bad, what in (
            (ends_early, "ends before it begins"),
            (outside, f"is outside the {_of(*ends)} of the mask"),
        ):
            if bad.any():
                raise PlanError(f"piece {bad.argmax()} {_numbers(tiles, int(bad.argmax()))} {what}")
        fitted = tiles.fitted()
        live = np.arange(len(tiles))[fitted.live()]
        clash = first_overlap(n, fitted[live])
        if clash is not None:
            one, other = sorted(live[[clash.one, clash.other]].tolist())
            raise PlanError(
                f"pieces {one} {_numbers(tiles, one)} and {other} {_numbers(tiles, other)} "
                f"overlap: query {clash.query} sees key {clash.key} in both; Mask.union joins "
                "masks that overlap"
            )
        segments = None if positions is None else _runs_of(positions, n)
        return cls(n, fitted[live], name, details, segments, keys)

    @classmethod
    def from_dense(cls, allowed: Any, max_pieces: int = MAX_PIECES) -> Mask:
        """The mask of a boolean array or tensor [n, n], queries by keys: True where a query sees a
        key; of one [n, keys], that of a stream of keys of their own.

        The pieces allow exactly these pairs. Raises `PlanError` for what is no table of booleans,
        `ConfigError` for more than `max_pieces` pieces.
        """
        allowed = _booleans(allowed)
        if allowed.ndim != 2:
            raise PlanError(
                f"a dense mask of shape {list(allowed.shape)}: it must be [n, n], queries by keys"
            )
        n, keys = (_length(size) for size in allowed.shape)
        block = _queries_at_once(keys)
        blocks = (allowed[first : first + block] for first in range(0, n, block))
        pieces = _pieces_of(blocks, keys, max_pieces)
        return cls(n, pieces, "dense", keys=None if keys == n else keys)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[..., Any],
        n: int,
        max_pieces: int = MAX_PIECES,
        device: str = "cpu",
        keys: int | None = None,
    ) -> Mask:
        """The mask of a function of FlexAttention, `mask_mod(b, h, q, k)`, for `n` tokens, and
        `keys` tokens of a stream of keys of their own.

        The function gets tensors of indices on `device`, q [queries, 1] and k [keys], and returns
        booleans. b and h have no value: batch rows with masks of their own are `Mask.batch`, and
        heads share a mask. Raises as `from_dense` does, and `ConfigError` where the function fails.
        """
        import torch

        n, count = _length(n), _length(n if keys is None else keys, "keys")
        all_keys = torch.arange(count, device=device)

        def dense(queries: torch.Tensor) -> np.ndarray:
            try:
                allowed = torch.as_tensor(
                    mask_mod(_NoValue(), _NoValue(), queries[:, None], all_keys)
                ).broadcast_to((len(queries), count))
            except Exception as error:
                raise ConfigError(
                    f"mask_mod failed with {type(error).__name__}: {one_line(error)}; b and h have "
                    "no value, because all heads have one mask: where it needs them, give lambda "
                    "b, h, q, k: mask_mod(0, 0, q, k)"
                ) from error
            return _booleans(allowed)

        blocks = map(dense, torch.arange(n, device=device).split(_queries_at_once(count)))
        return cls(n, _pieces_of(blocks, count, max_pieces), "mask_mod", keys=keys)

    @classmethod
    def union(cls, *masks: Mask) -> Mask:
        """The pairs that at least one of the `masks` allows; they may overlap. Positions are those
        of the first mask.

        Raises `PlanError` if there is none, or if they differ in length.
        """
        if not masks:
            raise PlanError("a union must have at least one mask")
        first = _all_masks(masks)[0]
        n = first.n
        if any((mask.n, mask.num_keys) != (n, first.num_keys) for mask in masks):
            sizes = ", ".join(_of(mask.n, mask.num_keys) for mask in masks)
            raise PlanError(f"a union of masks of {sizes}: they must be as long")
        pieces = Tiles.concatenate(*(mask.pieces for mask in masks)).trimmed()
        if first_overlap(n, pieces) is not None:
            pieces = joined(n, pieces)
        words = " or ".join(_different(masks))
        return replace(first, pieces=pieces, name="union", details=words)

    def __and__(self, window: tuple[int, int]) -> Mask:
        """The pairs that this mask allows and whose positions are within `window` (left, right); -1
        leaves a side open.

        Distances are those of `positions`: a response sees the last tokens of its prompt, however
        many responses lie between.
        """
        window = window_of(window)
        left, right = _band(window)
        start, position = self._runs()
        of_keys, key_position = self._runs(of_keys=True)
        pieces = self.pieces
        query = key = np.zeros(1, np.int64)
        several = max(len(start), len(of_keys)) > 1
        if several:
            edges = np.append(start, self.n), np.append(of_keys, self.num_keys)
            pieces, query, key = split_at_edges(pieces, *edges)
        data = pieces.data.copy()
        # Between two runs the distance of positions is that in the stream plus a constant.
        more = (key_position - of_keys)[key] - (position - start)[query]
        if left != -OPEN:
            np.maximum(data[4], left - more, out=data[4])
        if right != OPEN:
            np.minimum(data[5], right - more, out=data[5])
        narrow = Tiles(data).trimmed()
        if several:
            narrow = coalesce(narrow, np.zeros(len(narrow), np.int64))[0]
        words = _listed(self.details, _window_in_words(window, causal=False))
        return replace(self, pieces=narrow, details=words)

    @classmethod
    def full(cls, n: int, window: tuple[int, int] = (-1, -1), keys: int | None = None) -> Mask:
        """Every query sees every key, or the keys from i - left to i + right; -1 leaves a side open
        (as flash-attn does). `keys` is as in `documents`.
        """
        mask = cls._one_document(n, False, window, keys)
        return replace(mask, name="full", details=_window_in_words(window_of(window), causal=False))

    @classmethod
    def causal(cls, n: int, window: tuple[int, int] = (-1, 0), keys: int | None = None) -> Mask:
        """Query i sees keys up to i, and with a window no further back than i - left. `keys` is as
        in `documents`.
        """
        mask = cls._one_document(n, True, window, keys)
        return replace(
            mask, name="causal", details=_window_in_words(window_of(window), causal=True)
        )

    @classmethod
    def _one_document(cls, n: int, causal: bool, window: tuple[int, int], keys: int | None) -> Mask:
        of_keys = None if keys is None else [0, _length(keys, "keys")]
        return cls.documents([0, _length(n)], causal, window, cu_seqlens_k=of_keys)

    @classmethod
    def documents(
        cls,
        cu_seqlens: Sequence[int] | np.ndarray,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        n: int | None = None,
        cu_seqlens_k: Sequence[int] | np.ndarray | None = None,
    ) -> Mask:
        """Packed documents `[cu_seqlens[i], cu_seqlens[i + 1])` that do not see one another.

        `n` is the length of the stream, by default the end of the last document. Tokens behind the
        last document are padding: they see nothing, and nothing sees them. Empty documents are
        ignored. `cu_seqlens_k` gives the keys a stream of their own, with as many documents: the
        queries of a document see the keys of that of the same number. As in flash-attn, the last
        query and the last key of a document then have one position. Raises `PlanError` for offsets
        that do not start at 0, decrease or pass `n`, and for windows below -1.
        """
        start, end, n = _spans(cu_seqlens, n)
        expect("causal", causal, bool)
        window = window_of(window) if window is not None else (-1, 0 if causal else -1)
        left, right = _band(window)
        right = min(right, 0) if causal else right
        details = _listed(
            _documents_in_words(start, end, n),
            "" if causal else "not causal",
            _window_in_words(window, causal),
        )
        if cu_seqlens_k is not None:
            mask = cls._of_two_streams((start, end, n), cu_seqlens_k, left, right)
            return replace(mask, details=details)
        pieces = Tiles.columns(start, end, start, end, left, right).trimmed()
        return cls(n, pieces, "documents", details, _restarts(start, end, n))

    @classmethod
    def _of_two_streams(
        cls, queries: tuple[Ints, Ints, int], cu_seqlens_k: Any, left: int, right: int
    ) -> Mask:
        """`documents` with keys of their own: key - query from `left` to `right` by positions."""
        start, end, n = queries
        first, last, keys = _spans(cu_seqlens_k, None)
        if len(first) != len(start):
            raise PlanError(
                f"cu_seqlens_k has {len(first)} documents, cu_seqlens {len(start)}: the queries of "
                "a document see the keys of that of the same number"
            )
        ends = np.maximum(end - start, last - first)
        position, of_keys = ends - (end - start), ends - (last - first)
        slide = (first - of_keys) - (start - position)
        lo = np.where(left == -OPEN, -OPEN, left + slide)
        hi = np.where(right == OPEN, OPEN, right + slide)
        pieces = Tiles.columns(start, end, first, last, lo, hi).trimmed()
        segments, more = _segments(start, end, position, n), _segments(first, last, of_keys, keys)
        return cls(n, pieces, "documents", "", segments, keys, more)

    @classmethod
    def prefix(
        cls,
        n: int,
        lengths: int | Sequence[int] | np.ndarray,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
        window: tuple[int, int] = (-1, 0),
    ) -> Mask:
        """As `documents`, but every query also sees the prefix of its document, as far back as the
        window's left side.

        Query i sees keys from i - left to max(i + right, last token of the prefix). `lengths` are
        the lengths of the prefixes, one for each document or one for all; `cu_seqlens` is by
        default one document of `n` tokens. Raises `PlanError` as `documents` does, and for a prefix
        that is below 0 or longer than its document.
        """
        start, end, n, documents = _documents_or_one(cu_seqlens, n)
        window = window_of(window)
        lo, hi = _band(window)
        prefix = integers(lengths, "prefix lengths")
        if prefix.ndim and prefix.shape != start.shape:
            raise PlanError(f"{prefix.size} prefix lengths for {len(start)} documents")
        check_all(
            (prefix >= 0) & (prefix <= end - start),
            lambda i: (
                f"document {i} of {end[i] - start[i]} tokens has a prefix of "
                f"{np.broadcast_to(prefix, start.shape)[i]}"
            ),
        )
        # Before query `turn` the prefix ends further right than the window, from there on the
        # window does.
        stop = start + prefix
        turn = np.maximum(stop - hi, start)
        early = Tiles.columns(start, turn, start, stop, lo=lo)
        late = Tiles.columns(turn, end, start, end, lo, hi)
        pieces = Tiles.concatenate(early, late).trimmed()
        mean = f"{'mean ' * (prefix.size > 1)}{prefix.sum() / max(prefix.size, 1):.0f} tokens"
        details = _listed(mean, documents, _window_in_words(window, causal=window[1] == 0))
        pieces = pieces[sort_index(pieces.q0)]
        return cls(n, pieces, "prefix", details, _restarts(start, end, n))

    @classmethod
    def tree(
        cls,
        parents: Sequence[int] | np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        n: int | None = None,
    ) -> Mask:
        """Branches of a tree, stored one after another: each sees itself and its ancestors,
        causally, and nothing else.

        `parents` are the numbers of the branches that the branches continue, -1 for a root; a
        parent comes before its children. `lengths` are the branches' tokens. The positions of a
        branch go on where its parent ends, those of a root begin at 0. `n` is the length of the
        stream; tokens behind the last branch are padding. Raises `PlanError` for a parent that does
        not come before its child, lengths below 0 or past `n`, and lists of different lengths.

        Shared prefixes are trees of depth 2; a draft model's trunk and branches, and rollouts that
        fork, are deeper ones.
        """
        parent, length = integers(parents, "parents"), integers(lengths, "lengths")
        if parent.ndim != 1 or parent.shape != length.shape or not len(parent):
            raise PlanError(
                f"{parent.size} parents for {length.size} branches: give one for each, and at "
                "least one branch"
            )
        check_all(
            (parent >= -1) & (parent < np.arange(len(parent))),
            lambda i: f"branch {i} has parent {parent[i]}: it must be -1 or a branch before it",
        )
        if (length < 0).any():
            raise PlanError(
                f"branch {(length < 0).argmax()} has {length.min()} tokens: it must have at least 0"
            )
        if (length > MAX_TOKENS).any():
            raise PlanError(
                f"branch {length.argmax()} has {length.max()} tokens: a stream holds at most "
                f"{MAX_TOKENS}"
            )
        end = np.cumsum(length)
        start, n = end - length, _length(int(end[-1]) if n is None else n)
        if end[-1] > n:
            raise PlanError(f"the branches have {end[-1]} tokens, the stream {n}")
        depth, seen = np.zeros_like(start), []
        branch, ancestor = np.arange(len(parent)), parent
        while (ancestor >= 0).any():
            branch, ancestor = branch[ancestor >= 0], ancestor[ancestor >= 0]
            depth[branch] += length[ancestor]
            seen.append((ancestor, branch))
            ancestor = parent[ancestor]
        tiles = Tiles.columns(start, end, start, end, hi=0)
        if seen:
            ancestor, branch = (np.concatenate(column) for column in zip(*seen, strict=True))
            ancestor, q0, q1 = union(ancestor, start[branch], end[branch])
            shared = Tiles.columns(q0, q1, start[ancestor], end[ancestor])
            tiles = Tiles.concatenate(tiles, shared)
        tokens = int(end[-1])
        words = (
            f"{len(parent)} branches of {_many(int((parent < 0).sum()), 'root')}, {tokens} tokens"
        )
        words += _padding_in_words(tokens, n)
        return cls(n, _in_order(tiles.trimmed()), "tree", words, _segments(start, end, depth, n))

    @classmethod
    def shared_prefix(
        cls,
        groups: Iterable[tuple[int, Sequence[int]]],
        n: int | None = None,
        window: tuple[int, int] | None = None,
    ) -> Mask:
        """Groups of one prompt and its responses, one after another: a response sees its prompt and
        itself, causally.

        `groups` are pairs (tokens of the prompt, [tokens of each response]). The prompt is stored
        once, before its responses. The positions of each response continue from its prompt.
        `window` and `n` as elsewhere; tokens behind the last group are padding. Raises `PlanError`
        for lengths below 0, or past `n`.
        """
        parents: list[int] = []
        lengths: list[int] = []
        groups = list(expect("groups", groups, Iterable))
        for group, pair in enumerate(groups):
            if not (isinstance(pair, Sequence) and len(pair) == 2 and np.ndim(pair[1]) == 1):
                raise PlanError(
                    f"group {group} is {pair!r}: it must be (tokens of the prompt, [tokens of each "
                    "response])"
                )
            prompt, responses = pair
            for what, length in (
                ("prompt", prompt),
                *(("response", length) for length in responses),
            ):
                if integer(length, f"{what} length") < 0:
                    raise PlanError(
                        f"group {group} has a {what} of {length} tokens: it must have at least 0"
                    )
            parents += [-1, *[len(parents)] * len(responses)]
            lengths += [prompt, *responses]
        if not groups:
            raise PlanError(
                "shared prefixes need at least one group (prompt length, [response lengths])"
            )
        mask = cls.tree(parents, lengths, n)
        tokens = sum(prompt for prompt, _ in groups)
        words = (
            f"{_many(len(groups), 'prompt')} and {_many(len(parents) - len(groups), 'response')}, "
            f"{tokens} and {sum(lengths) - tokens} tokens"
        )
        words += _padding_in_words(sum(lengths), mask.n)
        mask = replace(mask, name="shared_prefix", details=words)
        return mask if window is None else mask & window

    @classmethod
    def images(
        cls,
        n: int,
        spans: Sequence[tuple[int, int]] | np.ndarray,
        cu_seqlens: Sequence[int] | np.ndarray | None = None,
    ) -> Mask:
        """Causal text in which the tokens of each span [start, end) see one another both ways, as
        those of an image do.

        `cu_seqlens` are packed documents, by default one of `n` tokens. Raises `PlanError` for
        spans that overlap, are empty, or are not inside one document.
        """
        starts, ends, n, documents = _documents_or_one(cu_seqlens, n)
        first, last, words = _ordered_spans(spans, n)
        document = np.searchsorted(ends, first, side="right")
        check_all(
            last <= np.append(ends, 0)[document],
            lambda i: (
                f"span {first[i]}..{last[i]} is not inside one document: its tokens cannot all see "
                "one another"
            ),
        )
        # A query of a span sees its document up to the end of the span, one of text up to itself.
        edges = np.unique(np.concatenate([starts, ends, first, last]))
        q0, q1 = edges[:-1], edges[1:]
        document = np.searchsorted(ends, q0, side="right")
        begin, visual = np.append(starts, 0)[document], np.isin(q0, first)
        pieces = Tiles.columns(q0, q1, begin, q1, hi=np.where(visual, OPEN, 0))
        pieces = pieces[document < len(ends)].trimmed()
        return cls(n, pieces, "images", _listed(words, documents), _restarts(starts, ends, n))

    @classmethod
    def with_global(
        cls,
        n: int,
        spans: Sequence[tuple[int, int]] | np.ndarray,
        window: tuple[int, int],
        causal: bool = True,
    ) -> Mask:
        """A window, and tokens of spans [start, end) that see every token and that every token
        sees, as far as `causal` allows.

        So query i sees key j if j is within `window` of i, or if one of the two is in a span;
        causal masks hide later keys. This is the global attention of Longformer (Beltagy et al.,
        arXiv:2004.05150). Raises `PlanError` for spans that overlap, are empty or lie outside of
        the stream.
        """
        n = _length(n)
        first, last, words = _ordered_spans(spans, n)
        window = window_of(window)
        left, right = _band(window)
        right = min(right, 0) if causal else right
        pieces = [
            (s, e, 0, n, -OPEN, 0 if causal else OPEN) for s, e in zip(first, last, strict=True)
        ]
        between = np.stack([np.append(0, last), np.append(first, n)], axis=1)
        for q0, q1 in between[between[:, 0] < between[:, 1]]:
            pieces.append((q0, q1, 0, n, left, right))
            for s, e in zip(first, last, strict=True):
                before = [(q0, q1, s, e, -OPEN, left - 1)] if left != -OPEN else []
                after = [(q0, q1, s, e, right + 1, OPEN)] if not causal and right != OPEN else []
                pieces += before + after
        details = _listed(words, "" if causal else "not causal", _window_in_words(window, causal))
        return cls(n, _in_order(Tiles.of(pieces).trimmed()), "global", details)

    @classmethod
    def block_causal(cls, n: int, block: int) -> Mask:
        """Query i sees all keys up to the end of its own block of `block` tokens."""
        n = _length(n)
        block = _block(block, n)
        start = np.arange(0, n, block)
        end = np.minimum(start + block, n)
        pieces = Tiles.columns(start, end, 0, end)
        return cls(n, pieces, "block_causal", f"blocks of {block} tokens")

    @classmethod
    def block_diffusion(cls, n: int, block: int) -> Mask:
        """A clean half and a noised half of one sequence in one stream of `n` tokens, for training
        of block diffusion.

        The clean half is block causal. A noised block sees itself and the clean blocks before it.
        Both halves have the positions 0 to n / 2 - 1. The mask is that of BD3-LM (Arriola et al.,
        arXiv:2503.09573), the clean half first. Raises `PlanError` if `n` is odd.
        """
        n = _length(n)
        block = _block(block, n)
        if n % 2:
            raise PlanError(f"a stream of {n} tokens has no two equal halves, clean and noised")
        half = n // 2
        start = np.arange(0, half, block)
        end = np.minimum(start + block, half)
        clean = Tiles.columns(start, end, 0, end)
        before = Tiles.columns(half + start, half + end, 0, start)
        itself = Tiles.columns(start, end, start, end).shifted(half, half)
        pieces = _in_order(Tiles.concatenate(clean, before, itself).trimmed())
        words, segments = f"blocks of {block} tokens", np.array([[0, half], [0, 0]])
        return cls(n, pieces, "block_diffusion", words, segments)

    @cached_property
    def digest(self) -> str:
        """Equal for equal masks with equal positions, whatever they are called."""
        parts = [self.segments, self.key_segments]
        sizes = f"{self.n} {self.pieces.data.shape} " + f"{self.keys} " * (self.keys is not None)
        positions = [b"" if part is None else part.tobytes() for part in parts]
        return digest(sizes.encode(), self.pieces.data.tobytes(), *positions)

    @property
    def positions(self) -> Ints:
        """The position of each token in its own sequence, for rotary and learned embeddings: int64
        [n].

        Documents and groups begin at 0, responses continue from their prompt, branches from their
        parent. Of a mask without such parts it is the place in the stream.
        """
        return self._positions(self.n)

    @property
    def key_positions(self) -> Ints:
        """The position of each key in its own sequence: int64 [num_keys]."""
        return self._positions(self.num_keys, of_keys=True)

    def _positions(self, n: int, of_keys: bool = False) -> Ints:
        start, position = self._runs(of_keys)
        return np.arange(n) + np.repeat(position - start, np.diff(np.append(start, n)))

    @property
    def last(self) -> NDArray[np.bool_]:
        """True for tokens without a next token in the stream: at the end of a run of positions, or
        not seen by the next token.

        bool [n]. Padding has no next token.
        """
        seen = np.zeros(self.n + 1, np.int64)
        # Of keys of their own, none is a token of the stream.
        p = self.pieces if self.keys is None else Tiles.of([(0, self.n, 0, self.n, -OPEN, OPEN)])
        previous = (p.lo <= -1) & (p.hi >= -1)
        first, end = np.maximum(p.q0, p.k0 + 1)[previous], np.minimum(p.q1, p.k1 + 1)[previous]
        some = first < end
        np.add.at(seen, first[some] - 1, 1)
        np.add.at(seen, end[some] - 1, -1)
        last = np.cumsum(seen)[:-1] == 0
        last[self._runs()[0][1:] - 1] = True
        return last

    def _runs(self, of_keys: bool = False) -> tuple[Ints, Ints]:
        """First token of each run of positions, of queries or of keys, and its position."""
        found = self.key_segments if of_keys and self.keys is not None else self.segments
        return (np.zeros(1, np.int64),) * 2 if found is None else (found[0], found[1])

    def to_dict(self) -> dict[str, Any]:
        """The mask in plain numbers, lists and strings, as JSON has them: `from_dict` makes an
        equal one.
        """
        values = {name: getattr(self, name) for name in _FIELDS}
        values |= {"pieces": self.pieces.data.T}
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in values.items()
            if name not in _OF_KEYS or self.keys is not None
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mask:
        """The mask that `to_dict` has written. Raises `PlanError` for anything else, overlapping
        pieces included.
        """
        unknown = [name for name in values if name not in _FIELDS]
        missing = [name for name in ("n", "pieces") if name not in values]
        if unknown or missing:
            raise PlanError(
                f"a mask in plain numbers has {', '.join(_FIELDS)}; here "
                f"{unknown or missing} is {'unknown' if unknown else 'missing'}")  # fmt: skip
        words = (str(values.get("name", "mask")), str(values.get("details", "")))
        keys = values.get("keys")
        mask = cls.from_pieces(values["n"], values["pieces"], *words, keys=keys)
        of_keys = None if keys is None else _read_segments(values.get("key_segments"), keys)
        segments = _read_segments(values.get("segments"), mask.n)
        return replace(mask, segments=segments, key_segments=of_keys)

    def allowed(self, i: int, j: int) -> bool:
        """Whether query i may see key j."""
        if not (0 <= integer(i, "query") < self.n and 0 <= integer(j, "key") < self.num_keys):
            size = _of(self.n, self.num_keys)
            raise PlanError(f"pair ({i}, {j}) is outside the {size} of the mask")
        pair = self.pieces.within(i, i + 1, j, j + 1)
        return bool((pair.q0 < pair.q1).any())

    @classmethod
    def batch(cls, rows: Sequence[Mask]) -> Mask:
        """Batch rows, each with its own mask, as one stream: row after row. Raises `PlanError`
        where some have keys of their own, and others not.
        """
        if not _all_masks(rows):
            raise PlanError("a batch must have at least one row")
        own = {row.keys is not None for row in rows}
        if len(own) > 1:
            raise PlanError("of the batch rows, all or none have keys of their own")
        starts, of_keys = (
            np.cumsum([0, *sizes])
            for sizes in ([row.n for row in rows], [row.num_keys for row in rows])
        )
        masks = list(zip(rows, starts.tolist(), of_keys.tolist(), strict=False))
        tiles = Tiles.concatenate(*(mask.pieces.shifted(*begin) for mask, *begin in masks))
        words = f"{len(rows)} rows ({'; '.join(_different(rows))})"
        runs = [np.add(mask._runs(), [[start], [0]]) for mask, start, _ in masks]
        found = cls(_length(int(starts[-1])), tiles, "batch", words, np.concatenate(runs, axis=1))
        if False in own:
            return found
        runs = [np.add(mask._runs(of_keys=True), [[start], [0]]) for mask, _, start in masks]
        return replace(
            found,
            keys=_length(int(of_keys[-1]), "keys"),
            key_segments=np.concatenate(runs, axis=1),
        )

    def spread(self, edges: Ints, owner: Ints, copies: int) -> Mask:
        """Of queries that all of `copies` ranks hold: a copy of the queries for each rank, one
        after another, which sees that rank's keys alone. Chunk c of the keys, `[edges[c],
        edges[c + 1])`, is that of rank `owner[c]`.
        """
        cut, _, chunk = split_at_edges(self.pieces, np.array([0, self.n]), edges)
        pieces = _in_order(cut.shifted(owner[chunk] * self.n, 0))
        start, position = self._runs()
        runs = (np.arange(copies)[:, None] * self.n + start).reshape(-1)
        segments, of_keys = np.stack([runs, np.tile(position, copies)]), self._runs(of_keys=True)
        mine, keys = (_length(self.n * copies), pieces), (self.num_keys, np.stack(of_keys))
        return Mask(*mine, self.name, self.details, segments, *keys)

    def area(self) -> int:
        """Allowed (query, key) pairs, exactly."""
        return int(self.pieces.area().sum())

    def dense(self) -> np.ndarray:
        """The mask as a boolean `[n, num_keys]` array, for small n."""
        return paint(self.pieces, self.n, self.num_keys) > 0

    def describe(self) -> str:
        """The mask in words, as "causal, window 4096" or "documents: 113, mean 580 tokens"."""
        separator = ", " if self.name in ("full", "causal") else ": "
        return self.name.replace("_", " ") + separator * bool(self.details) + self.details

    def __repr__(self) -> str:
        return f"<Mask of {_of(self.n, self.num_keys)}, {self.describe()}>"


_FIELDS = ("n", "pieces", "segments", "name", "details", "keys", "key_segments")
_OF_KEYS = ("keys", "key_segments")


def paint(tiles: Tiles | Sequence[Tile], queries: int, keys: int) -> np.ndarray:
    """How many tiles allow each pair of a small score matrix: int64 `[queries, keys]`."""
    picture = np.zeros((queries, keys), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in tiles:
        offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        picture[q0:q1, k0:k1] += (offset >= lo) & (offset <= hi)
    return picture


class _NoValue:
    """What a function gets for an argument on which it must not depend."""

    def __eq__(self, _: object) -> bool:
        raise TypeError("it is compared with b or h")


def _booleans(values: Any) -> np.ndarray:
    """An array, or a tensor on any device, of booleans. Raises `PlanError` for others."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.dtype != bool:
        raise PlanError(
            f"a dense mask must be boolean, True where a query sees a key, not {array.dtype}"
        )
    return array


def _all_masks(masks: Sequence[Mask]) -> Sequence[Mask]:
    for mask in expect("masks", masks, Sequence):
        expect("mask", mask, Mask)
    return masks


def _queries_at_once(n: int) -> int:
    """So that about 16 million pairs of a dense mask are looked at at a time."""
    return max(1, (1 << 24) // n)


def _pieces_of(blocks: Iterable[np.ndarray], n: int, most: int) -> Tiles:
    """The pieces of a dense mask, given as `blocks` [queries, n], one after another.

    A run of keys goes on at the next query where both of its ends stay, or move on by one key. A
    hidden key lies between two runs, so a run goes on in one other at most. A piece is a chain of
    such runs up to the query at which no band has its ends: the first key stays before it moves,
    the last one moves before it stays.
    """
    parts, first = [], 0
    for allowed in blocks:
        edges = np.diff(np.pad(allowed, ((0, 0), (1, 1))).view(np.int8), axis=1)
        query, start = np.nonzero(edges == 1)
        parts.append(np.stack([query + first, start, np.nonzero(edges == -1)[1]]))
        first += len(allowed)
    table, most = np.concatenate(parts, axis=1), integer(most, "max_pieces")
    query, start, _ = table
    place = query * (n + 1) + start
    before = np.maximum(np.searchsorted(place, place - (n + 1), side="right") - 1, 0)
    moved = table - table[:, before]
    goes_on = (moved[0] == 1) & ((moved[1:] >> 1) == 0).all(0)
    chain = np.where(goes_on, before, np.arange(len(place)))
    while not np.array_equal(chain, further := chain[chain]):
        chain = further
    order = np.argsort(chain, kind="stable")
    query, start, end = table[:, order]
    late, early = np.diff(start), np.diff(end)
    breaks = np.diff(chain[order]) != 0
    bent = (late[1:] < late[:-1]) | (early[1:] > early[:-1])
    breaks[every_other(np.flatnonzero(bent & ~breaks[1:] & ~breaks[:-1]) + 1)] = True
    one, last = runs(breaks, len(query))
    if len(one) > most:
        raise ConfigError(
            f"the mask of {n} tokens has {len(one)} pieces, more than max_pieces={most}: each is "
            "computed and merged by itself, which is slow; give a mask whose queries see longer "
            "runs of keys, or raise max_pieces"
        )
    q0, k0, k1 = query[one], start[one], end[last]
    lo = np.where(start[last] > k0, start[last] - query[last], -OPEN)
    hi = np.where(end[one] < k1, end[one] - 1 - q0, OPEN)
    return _in_order(Tiles.columns(q0, query[last] + 1, k0, k1, lo, hi).trimmed())


def _length(n: int, what: str = "n") -> int:
    return size_within(n, what, MAX_TOKENS, f"a stream of {n} tokens: it must hold")


def _of(n: int, keys: int) -> str:
    return f"{n} tokens" if n == keys else f"{n} queries and {keys} keys"


def _block(block: int, n: int) -> int:
    """The tokens of a block; of one that is longer than the stream, those of the stream."""
    if integer(block, "block") < 1:
        raise PlanError(f"blocks of {block} tokens: they must have at least 1")
    return min(int(block), n)


def _ordered_spans(spans: Sequence[tuple[int, int]] | np.ndarray, n: int) -> tuple[Ints, Ints, str]:
    """Checked spans, ascending, as starts and ends; and in words."""
    pairs = integers(spans, "spans")
    pairs = pairs.reshape(0, 2) if not pairs.size else pairs
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise PlanError(f"spans are pairs (start, end), not an array of {list(pairs.shape)}")
    start, end = pairs[np.argsort(pairs[:, 0], kind="stable")].T
    check_all(
        (start >= 0) & (end <= n) & (start < end),
        lambda i: f"span {start[i]}..{end[i]} is empty or outside the {n} tokens of the stream",
    )
    check_all(
        end[:-1] <= start[1:],
        lambda i: f"spans {start[i]}..{end[i]} and {start[i + 1]}..{end[i + 1]} overlap",
    )
    return start, end, f"{_many(len(start), 'span')}, {int((end - start).sum())} tokens"


def _runs_of(positions: Sequence[int] | np.ndarray, n: int) -> Ints | None:
    """`Mask.segments` from the positions of all tokens."""
    values = integers(positions, "positions")
    if values.shape != (n,) or ((values < 0) | (values >= MAX_TOKENS)).any():
        raise PlanError(
            f"positions of shape {list(values.shape)}, {values.min(initial=0)} to "
            f"{values.max(initial=0)}: it must be [{n}], from 0 to below {MAX_TOKENS}"
        )
    start, _ = runs(np.diff(values) != 1, n)
    return _plain(np.stack([start, values[start]]))


def _restarts(start: Ints, end: Ints, n: int) -> Ints | None:
    """`Mask.segments` of documents, which begin at position 0."""
    return _segments(start, end, np.zeros_like(start), n)


def _segments(start: Ints, end: Ints, position: Ints, n: int) -> Ints | None:
    """`Mask.segments` of runs [start, end), end to end from token 0; the padding behind them begins
    at position 0.
    """
    live = start < end
    start, position = start[live], position[live]
    total = int(end[-1]) if len(end) else 0
    padding = np.array([[total], [0]])[:, : int(total < n)]
    return _plain(np.concatenate([np.stack([start, position]), padding], axis=1))


def _read_segments(values: Any, n: int) -> Ints | None:
    """Checked segments of `n` tokens. Raises `PlanError` for others."""
    if values is None:
        return None
    segments = integers(values, "segments")
    if (
        segments.ndim != 2
        or segments.shape[0] != 2
        or not segments.shape[1]
        or segments[0, 0] != 0
        or (segments < 0).any()
    ):
        raise PlanError(
            "segments of a mask are first tokens, from 0, and their positions: two lists of the "
            "same length"
        )
    if (segments >= MAX_TOKENS).any():
        raise PlanError(
            f"segments of a mask hold {segments.max()}: tokens and positions must be below "
            f"{MAX_TOKENS}"
        )
    if (np.diff(segments[0]) <= 0).any() or segments[0, -1] >= n:
        raise PlanError(
            f"segments of a mask of {n} tokens must begin at ascending tokens, not "
            f"{short(segments[0])}"
        )
    return segments


def _plain(segments: Ints) -> Ints | None:
    """None for one run from position 0."""
    return None if segments.shape[1] == 1 and not segments.any() else segments


def _in_order(pieces: Tiles) -> Tiles:
    return pieces[sort_index(pieces.q0, pieces.k0)]


def _listed(*words: str) -> str:
    """The words that say something, one after another."""
    return ", ".join(filter(None, words))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _different(masks: Sequence[Mask]) -> list[str]:
    """The first different masks in words."""
    words = list(dict.fromkeys(mask.describe() for mask in masks))
    return words[:MAX_DESCRIBED] + ["..."] * (len(words) > MAX_DESCRIBED)


def _padding_in_words(used: int, n: int) -> str:
    return f", {n - used} tokens of padding" if n > used else ""


def _spans(cu_seqlens: Sequence[int] | np.ndarray, n: int | None) -> tuple[Ints, Ints, int]:
    """Checked starts and ends of documents, and the length of the stream."""
    edges = offsets(cu_seqlens, "cu_seqlens")
    n = _length(int(edges[-1]) if n is None else n)
    if edges[-1] > n:
        raise PlanError(f"cu_seqlens ends at {edges[-1]}, past the {n} tokens of the stream")
    return edges[:-1], edges[1:], n


def _documents_or_one(
    cu_seqlens: Sequence[int] | np.ndarray | None, n: int
) -> tuple[Ints, Ints, int, str]:
    """As `_spans`, and the documents in words; without `cu_seqlens` one document, and no words."""
    if cu_seqlens is None:
        return *_spans([0, _length(n)], n), ""
    start, end, n = _spans(cu_seqlens, n)
    return start, end, n, f"documents: {_documents_in_words(start, end, n)}"


def window_of(window: tuple[int, int]) -> tuple[int, int]:
    """A window (left, right) as whole numbers: -1 for a side that is open, or reaches further than
    any stream.

    Raises `PlanError` for what is not a window.
    """
    try:
        left, right = (integer(side, "window side") for side in window)
    except (TypeError, ValueError) as error:
        raise (
            error
            if isinstance(error, PlanError)
            else PlanError(f"window {window!r}: it is a pair (left, right)")
        ) from None
    if left < -1 or right < -1:
        raise PlanError(f"window ({left}, {right}): each side must be -1 (open) or at least 0")
    return -1 if left >= MAX_TOKENS else left, -1 if right >= MAX_TOKENS else right


def _band(window: tuple[int, int]) -> tuple[int, int]:
    """A checked window (left, right) as bounds on key - query."""
    left, right = window
    return -OPEN if left < 0 else -left, OPEN if right < 0 else right


def _window_in_words(window: tuple[int, int], causal: bool) -> str:
    """A checked window (left, right); "" where it hides nothing. A causal mask has no keys on the
    right.
    """
    left, right = window
    if causal:
        return f"window {left}" if left >= 0 else ""
    if left == right:
        return f"window {left} on both sides" if left >= 0 else ""
    before, after = (str(side) if side >= 0 else "all" for side in (left, right))
    return f"window {before} before, {after} after"


def _documents_in_words(start: Ints, end: Ints, n: int) -> str:
    """How many documents hold a token, how many tokens on average, and the padding behind them."""
    count, total = int((end > start).sum()), int((end - start).sum())
    return f"{count}, mean {total / max(count, 1):.0f} tokens{_padding_in_words(total, n)}"


def _read(pieces: Iterable[Sequence[int]]) -> Tiles:
    """Pieces of 4 or 6 numbers as tiles; a bound of a band beyond `OPEN` becomes open. Raises
    `PlanError` for others.
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
    """A piece as a person writes it."""
    values = tuple(tiles.data[:, i].tolist())
    return values[:4] if values[4:] == (-OPEN, OPEN) else values
