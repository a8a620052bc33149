"""Masks: for each query of a token stream, the keys that it may see, as intervals.

A mask is a table of disjoint pieces, each a rectangle of the score matrix cut by a diagonal band
(`cp_ring.plan.mask_table`). A constructor is a function that makes such a table, and nothing else
in cp_ring knows which one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cp_ring.errors import PlanError, expect
from cp_ring.plan.mask_table import (
    ONE_RUN,
    MaskTable,
    band_of,
    segments_of,
)
from cp_ring.plan.ranges import (
    MAX_TOKENS,
    Integers,
    Ints,
    Spans,
    check_all,
    documents_of,
    expand,
    integer,
    integers,
    ordered_spans,
    stream_length,
)
from cp_ring.plan.tiles import OPEN, Tiles

MAX_PIECES = 4096
"""The default limit on the pieces of a mask that `Mask.from_dense` or `Mask.from_mask_mod` makes.
"""


class Mask(MaskTable):
    """Which keys each query of a stream of `n` tokens may see: a table of pieces with the fields of
    `MaskTable`, and a constructor for each kind of mask that people train with.

        mask = Mask.documents([0, 4096, 8192])
    """

    @classmethod
    def from_dense(cls, allowed: Any, max_pieces: int = MAX_PIECES) -> Mask:
        """The mask of booleans [n, n], queries by keys: True where a query sees a key.

            mask = Mask.from_dense(np.tril(np.ones((8, 8), bool)))  # causal

        The pieces allow exactly these pairs. Raises `PlanError` if `allowed` is not such a table,
        `ConfigError` if it needs more than `max_pieces` pieces.
        """
        from cp_ring.integrations.dense_masks import of_array

        n, pieces = of_array(allowed, max_pieces)
        return cls(n, pieces, "dense")

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[..., Any],
        n: int,
        max_pieces: int = MAX_PIECES,
        device: str = "cpu",
    ) -> Mask:
        """The mask of a FlexAttention function `mask_mod(b, h, q, k)` over `n` tokens.

            mask = Mask.from_mask_mod(lambda b, h, q, k: q - k >= 4, n=64)

        Torch's `create_mask` maps the function over queries and keys: it gets one of each, as
        tensors without dimensions on `device`, and returns one boolean. Torch's `and_masks`,
        `or_masks` and `noop_mask` are such functions, and so is the `mask_mod` of a `BlockMask`. b
        and h have no value: use `Mask.batch` for batch rows with different masks; all heads share a
        mask. Raises as `from_dense` does, and `ConfigError` if the function fails.
        """
        from cp_ring.integrations.dense_masks import of_function

        n = stream_length(n)
        return cls(n, of_function(mask_mod, n, max_pieces, device), "mask_mod")

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Spans,
        k_ranges: Spans,
        types: Any = "full",
        n: int | None = None,
    ) -> Mask:
        """The mask of MagiAttention's slices: queries in `q_ranges[i]` see keys in `k_ranges[i]`,
        within `types[i]`.

            mask = Mask.from_ranges([(0, 4), (4, 8)], [(0, 4), (0, 8)], "causal")

        Ranges are pairs (start, end). A type is "full" or 0; "causal" or 1, in which the last query
        sees up to the last key; "inv_causal" or 2, in which the first query sees from the first key
        on; "bi_causal" or 3, which is both. Give one type for all slices or one for each. `n` is by
        default the end of the last range. Raises `PlanError` for other types, for lists of
        different lengths, and for slices that overlap.
        """
        from cp_ring.integrations.slices import pieces_of

        pieces = pieces_of(q_ranges, k_ranges, types)
        n = int(pieces[:, :4].max(initial=0)) if n is None else n
        return cls.from_pieces(n, pieces.tolist(), "ranges")

    @classmethod
    def full(cls, n: int, window: tuple[int, int] = (-1, -1)) -> Mask:
        """Every query sees every key; with a window, the keys from i - left to i + right, where -1
        leaves a side open.

            mask = Mask.full(8192, window=(128, 128))
        """
        return replace(cls.documents([0, stream_length(n)], False, window), name="full")

    @classmethod
    def causal(cls, n: int, window: tuple[int, int] = (-1, 0)) -> Mask:
        """Query i sees keys up to i; with a window, from i - left on.

            mask = Mask.causal(8192, window=(4096, 0))

        Raises `PlanError` for a window that is not a pair, or below -1.
        """
        return replace(cls.documents([0, stream_length(n)], True, window), name="causal")

    @classmethod
    def documents(
        cls,
        cu_seqlens: Integers,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        n: int | None = None,
    ) -> Mask:
        """Packed documents `[cu_seqlens[i], cu_seqlens[i + 1])`; a query sees only its own
        document.

            mask = Mask.documents([0, 300, 420, 512])  # of 300, 120 and 92 tokens

        `n` is the length of the stream, by default the end of the last document. Tokens behind the
        last document are padding: they see nothing, and nothing sees them. Empty documents are
        ignored. Raises `PlanError` for offsets that do not start at 0, decrease or pass `n`, and
        for windows below -1.
        """
        start, end, n = documents_of(cu_seqlens, n)
        expect("causal", causal, bool)
        left, right = band_of((-1, -1) if window is None else window, causal)
        pieces = Tiles.columns(start, end, start, end, left, right).trimmed()
        return cls(n, pieces, "documents", segments_of(start, end, n))

    @classmethod
    def blockwise(
        cls,
        cu_seqlens: Integers,
        causal: bool = True,
        n: int | None = None,
    ) -> Mask:
        """Packed documents in which the last one that holds a token also sees all documents before
        it.

            mask = Mask.blockwise([0, 1000, 2000, 2100])  # two passages and a question

        So retrieved passages or examples are read apart, and a question behind them reads all:
        block attention (Ma et al., arXiv:2409.15355). Positions are places in the stream. Raises
        `PlanError` as `documents` does.
        """
        mask = cls.documents(cu_seqlens, causal, n=n)
        pieces = mask.pieces.data.copy()
        pieces[2, -1:] = 0  # keys of the last piece begin at token 0
        return replace(mask, pieces=Tiles(pieces), name="blockwise", segments=ONE_RUN)

    @classmethod
    def prefix(
        cls,
        n: int,
        lengths: int | Integers,
        cu_seqlens: Integers | None = None,
        window: tuple[int, int] = (-1, 0),
    ) -> Mask:
        """Packed documents in which every query also sees the prefix of its document, within the
        window's left side.

            mask = Mask.prefix(8192, 1024)  # a prefix-LM

        Query i sees keys from i - left to max(i + right, last token of the prefix). `lengths` are
        the lengths of the prefixes, one for each document or one for all; `cu_seqlens` is by
        default one document of `n` tokens. Raises `PlanError` as `documents` does, and for a prefix
        that is below 0 or longer than its document.
        """
        start, end, n = _documents_or_one(cu_seqlens, n)
        lo, hi = band_of(window)
        prefix = integers(lengths, "prefix lengths")
        if prefix.ndim and prefix.shape != start.shape:
            raise PlanError(
                f"{prefix.size} prefix lengths for {len(start)} documents: it must be one for all, "
                "or one for each"
            )
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
        return cls(n, pieces, "prefix", segments_of(start, end, n))

    @classmethod
    def tree(
        cls,
        parents: Integers,
        lengths: Integers,
        n: int | None = None,
    ) -> Mask:
        """Branches of a tree, one after another: each sees itself and its ancestors, causally.

            mask = Mask.tree([-1, 0, 0], [1024, 256, 300])  # a trunk and two branches

        `parents` has for each branch the number of the branch that it continues, -1 for a root; a
        parent comes before its children. `lengths` has the tokens of each branch. The positions of
        a branch continue from the end of its parent; those of a root begin at 0. `n` is the length
        of the stream; tokens behind the last branch are padding. Raises `PlanError` for a parent
        that does not come before its child, lengths below 0 or past `n`, and lists of different
        lengths.

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
        check_all(
            (length >= 0) & (length <= MAX_TOKENS),
            lambda i: f"branch {i} has {length[i]} tokens: it must have 0 to {MAX_TOKENS}",
        )
        end = np.cumsum(length)
        start, n = end - length, stream_length(int(end[-1]) if n is None else n)
        if end[-1] > n:
            raise PlanError(f"the branches have {end[-1]} tokens, but the stream has {n}")
        depth = [0] * len(parent)
        for branch, above in enumerate(parent.tolist()):
            if above >= 0:
                depth[branch] = depth[above] + int(length[above])
        q0, q1, ancestor = _descendants(parent, start, end)
        shared = Tiles.columns(q0, q1, start[ancestor], end[ancestor])
        tiles = Tiles.concatenate(Tiles.columns(start, end, start, end, hi=0), shared)
        segments = segments_of(start, end, n, np.array(depth))
        return cls(n, tiles.trimmed(), "tree", segments)

    @classmethod
    def shared_prefix(
        cls,
        groups: Iterable[tuple[int, Sequence[int]]],
        n: int | None = None,
        window: tuple[int, int] | None = None,
    ) -> Mask:
        """Groups of one prompt and its responses: a response sees its prompt and itself, causally.

            mask = Mask.shared_prefix([(1024, [256, 300])])  # a prompt and two responses

        `groups` are pairs (tokens of the prompt, [tokens of each response]). The prompt is stored
        once, before its responses. The positions of each response continue from its prompt.
        `window` and `n` are those of `documents`; tokens behind the last group are padding. Raises
        `PlanError` for lengths below 0 or past `n`.
        """
        parents: list[int] = []
        lengths: list[int] = []
        for group, pair in enumerate(expect("groups", groups, Iterable)):
            if not (isinstance(pair, Sequence) and len(pair) == 2 and np.ndim(pair[1]) == 1):
                raise PlanError(
                    f"group {group} is {pair!r}: it must be (tokens of the prompt, [tokens of each "
                    "response])"
                )
            prompt, responses = pair
            parents += [-1, *[len(parents)] * len(responses)]
            lengths += [prompt, *responses]
        mask = replace(cls.tree(parents, lengths, n), name="shared_prefix")
        return mask if window is None else mask & window

    @classmethod
    def images(
        cls,
        n: int,
        spans: Spans,
        cu_seqlens: Integers | None = None,
    ) -> Mask:
        """Causal text in which the tokens of each span [start, end), as an image, see one another
        both ways.

            mask = Mask.images(8192, [(1000, 2600), (5000, 6600)])

        `cu_seqlens` are packed documents, by default one of `n` tokens. Raises `PlanError` for
        spans that overlap, are empty, or are not inside one document.
        """
        _, ends, n = _documents_or_one(cu_seqlens, n)
        first, last = ordered_spans(spans, n)
        document = np.searchsorted(ends, first, side="right")
        check_all(
            last <= np.append(ends, 0)[document],
            lambda i: (
                f"span {first[i]}..{last[i]} is not inside one document: its tokens cannot all see "
                "one another"
            ),
        )
        both_ways = cls(n, Tiles.columns(first, last, first, last))
        mask = cls.union(cls.documents([0, *ends], n=n), both_ways)
        return replace(mask, name="images")

    @classmethod
    def with_global(
        cls,
        n: int,
        spans: Spans,
        window: tuple[int, int],
        causal: bool = True,
    ) -> Mask:
        """A window, and spans [start, end) of tokens that see every token and that every token
        sees.

            mask = Mask.with_global(8192, [(0, 256)], window=(1024, 0))

        Query i sees key j if j is within `window` of i, or if one of the two is in a span; causal
        masks hide later keys. This is the global attention of Longformer (Beltagy et al.,
        arXiv:2004.05150). Raises `PlanError` for spans that overlap, are empty or lie outside of
        the stream.
        """
        n = stream_length(n)
        first, last = ordered_spans(spans, n)
        left, right = band_of(window, causal)
        latest = 0 if causal else OPEN
        q0, q1 = np.append(0, last), np.append(first, n)  # the queries between the spans
        gap, span = np.indices((len(q0), len(first))).reshape(2, -1)
        columns = q0[gap], q1[gap], first[span], last[span]
        pieces = Tiles.concatenate(
            Tiles.columns(first, last, 0, n, hi=latest),
            Tiles.columns(q0, q1, 0, n, left, right),
            Tiles.columns(*columns, hi=left - 1),
            Tiles.columns(*columns, right + 1, latest),
        )
        return cls(n, pieces.trimmed(), "global")

    @classmethod
    def block_causal(cls, n: int, block: int, cu_seqlens: Integers | None = None) -> Mask:
        """Query i sees the keys of its document up to the end of its own block of `block` tokens.

            mask = Mask.block_causal(8192, block=64)

        `cu_seqlens` are packed documents, by default one of `n` tokens; blocks are counted from the
        first token of each. Raises `PlanError` for blocks below 1 and as `documents` does.
        """
        starts, ends, n = _documents_or_one(cu_seqlens, n)
        if integer(block, "block") < 1:
            raise PlanError(f"blocks of {block} tokens: they must have at least 1")
        block = min(int(block), n)
        document, number = expand(np.zeros_like(starts), -(-(ends - starts) // block))
        first = starts[document]
        start = first + number * block
        end = np.minimum(start + block, ends[document])
        pieces = Tiles.columns(start, end, first, end)
        return cls(n, pieces, "block_causal", segments_of(starts, ends, n))

    @classmethod
    def block_diffusion(cls, n: int, block: int) -> Mask:
        """A clean half and a noised half of one sequence in one stream of `n` tokens, for block
        diffusion.

            mask = Mask.block_diffusion(16384, block=1024)

        The clean half is block causal. A noised block sees itself and the clean blocks before it.
        Both halves have the positions 0 to n / 2 - 1. The mask is that of BD3-LM (Arriola et al.,
        arXiv:2503.09573), the clean half first. Raises `PlanError` if `n` is odd.
        """
        n = stream_length(n)
        if n % 2:
            raise PlanError(
                f"{n} tokens have no two equal halves, clean and noised: n must be even"
            )
        half = n // 2
        clean = cls.block_causal(half, block).pieces
        start, end = clean.q0, clean.q1
        before = Tiles.columns(half + start, half + end, 0, start)
        itself = Tiles.columns(start, end, start, end).shifted(half, half)
        pieces = Tiles.concatenate(clean, before, itself).trimmed()
        return cls(n, pieces, "block_diffusion", np.array([[0, half], [0, 0]]))


def _descendants(parent: Ints, start: Ints, end: Ints) -> Ints:
    """Return the runs of tokens whose branches continue one branch of the tree: int64 [3, runs],
    the first token, the end and the branch that they continue.

    From a branch to the next one, the ancestors change up to the nearest common ancestor. A parent
    has the lower number, so of two different ancestors the one with the higher number is not
    common.
    """
    parents, runs, opened = parent.tolist(), [], [0] * len(parent)
    live = np.flatnonzero(start < end)
    now = -1
    for branch, token in [*zip(live.tolist(), start[live].tolist(), strict=True), (-1, end[-1])]:
        old, new = now, parents[branch] if branch >= 0 else -1
        now = new
        while old != new:
            if new > old:
                opened[new], new = token, parents[new]
            else:
                runs.append((opened[old], int(token), old))
                old = parents[old]
    return np.array(runs, np.int64).reshape(-1, 3).T


def _documents_or_one(cu_seqlens: Integers | None, n: int) -> tuple[Ints, Ints, int]:
    """Return `documents_of`; without `cu_seqlens`, of one document."""
    return documents_of([0, stream_length(n)] if cu_seqlens is None else cu_seqlens, n)
