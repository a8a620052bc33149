"""The masks of LongCA-bench (arXiv 2510.17896), with 8,192 tokens a rank, as masks of cp_ring.

Documents are drawn from `lengths.json`: shares of documents, in percent, by the tokens that they
have at most, as three public collections of texts have them. Within a class all lengths are alike.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cp_ring.plan import Mask
from cp_ring.plan.tiles import OPEN, Tiles

TOKENS, WINDOW, BLOCK = 8192, 1024, 1024
SIZES = (8, 16, 32, 64, 96)
SEEDS = (42, 1, 2, 3)
LONG = 8 << 10, 30 << 10
"""Tokens of the long documents, of which most of the stream consists in the masks `*_long`."""


class Cell(NamedTuple):
    """One mask of the benchmark: its kind, the number of ranks, the documents' draw."""

    kind: str
    cp: int
    source: str = ""
    seed: int = 0

    def __str__(self):
        return " ".join(map(str, [part for part in self if part]))

    def mask(self):
        """The mask of all ranks."""
        n = TOKENS * self.cp
        rng = np.random.default_rng([self.seed, *self.source.encode(), self.cp])
        return globals()[f"_{self.kind}"](n, self.source, rng)


def counted_ranks(members, cp):
    """The members of a ring of `cp` ranks whose kernel calls and merges the older model of time
    counts: of up to 16 ranks all, else the first, one in the middle and the last. It takes others
    to be as the slowest of these.
    """
    return list(range(members)) if cp <= 16 else sorted({0, members // 2, members - 1})


def named(name):
    """The cell that `str` shows so."""
    return next(cell for cell in cells() if str(cell) == name)


def cells():
    """All 500 cells."""
    for kind, draws in KINDS.items():
        for cp in SIZES:
            if draws == "one":
                yield Cell(kind, cp)
            for seed in SEEDS if draws != "one" else ():
                for source in _sources() if draws == "documents" else ("",):
                    yield Cell(kind, cp, source, seed)


KINDS = {
    "full": "one",
    "causal": "one",
    "causal_document": "documents",
    "full_document": "documents",
    "share_question": "documents",
    "causal_blockwise": "documents",
    "prefix_lm_causal": "seeds",
    "prefix_lm_document": "documents",
    "sliding_window": "one",
    "sliding_window_causal": "one",
    "global_sliding_window": "seeds",
    "block_causal_document": "seeds",
    "full_document_long": "documents",
    "causal_document_long": "documents",
}


@cache
def _sources():
    return json.loads((Path(__file__).parent / "lengths.json").read_text())


def _lengths(n, source, rng):
    """Lengths of documents of `n` tokens together; the last one is cut."""
    shares = _sources()[source]
    most, share = np.array(list(shares), np.int64), np.array(list(shares.values()))
    least = np.append(1, most[:-1] + 1)
    count = n // 100
    kind = rng.choice(len(most), count, p=share / share.sum())
    return _cut(rng.integers(least[kind], most[kind] + 1), n)


def _cut(lengths, n):
    ends = np.cumsum(lengths)
    return np.diff(np.concatenate([[0], ends[ends < n], [n]]))


def _offsets(n, source, rng):
    return np.cumsum([0, *_lengths(n, source, rng)])


def _long_offsets(n, source, rng):
    """Two fifths of the tokens in short documents, the others in long ones, in any order."""
    short = n * 2 // 5
    long = _cut(rng.integers(*LONG, n // LONG[0] + 1, endpoint=True), n - short)
    return np.cumsum([0, *rng.permutation([*_lengths(short, source, rng), *long])])


def _full(n, source, rng):
    return Mask.full(n)


def _causal(n, source, rng):
    return Mask.causal(n)


def _causal_document(n, source, rng):
    return Mask.documents(_offsets(n, source, rng))


def _full_document(n, source, rng):
    return Mask.documents(_offsets(n, source, rng), causal=False)


def _full_document_long(n, source, rng):
    return Mask.documents(_long_offsets(n, source, rng), causal=False)


def _causal_document_long(n, source, rng):
    return Mask.documents(_long_offsets(n, source, rng))


def _share_question(n, source, rng):
    """The first document is the question of all others."""
    first, *others = _lengths(n, source, rng).tolist()
    return Mask.shared_prefix([(first, others)])


def _causal_blockwise(n, source, rng):
    """Causal documents, of which the last one also sees all others."""
    edges = _offsets(n, source, rng)
    start, end = edges[:-1], edges[1:]
    begin = np.append(start[:-1], 0)
    return Mask(n, Tiles.columns(start, end, begin, end, hi=0).trimmed(), "causal_blockwise")


def _prefix_lm_causal(n, source, rng):
    return Mask.prefix(n, int(rng.integers(1, n + 1)))


def _prefix_lm_document(n, source, rng):
    """Documents with prefixes of one length, that of a part of the first document."""
    edges = _offsets(n, source, rng)
    prefix = int(rng.integers(1, edges[1] + 1))
    return Mask.prefix(n, np.minimum(prefix, np.diff(edges)), edges)


def _sliding_window(n, source, rng):
    return Mask.full(n, (WINDOW, WINDOW))


def _sliding_window_causal(n, source, rng):
    return Mask.causal(n, (WINDOW, 0))


def _global_sliding_window(n, source, rng):
    """The first tokens with those behind them and the last tokens with the first, each cut by a
    diagonal to the bottom right corner, and a window of as many tokens behind the first.
    """
    first = int(rng.integers(1, n // 3))
    window = Mask.full(n - first, (first, first)).pieces.shifted(first, first)
    corners = [
        (0, n, 0, first, -OPEN, first - n),
        (0, first, first, n, -OPEN, n - first),
    ]
    pieces = Tiles.concatenate(Tiles.of(corners), window).trimmed()
    return Mask(n, pieces[np.argsort(pieces.q0, kind="stable")], "global_sliding_window")


def _block_causal_document(n, source, rng):
    """Documents of 1 to 8 blocks: a query sees its document up to the end of its own block."""
    blocks = _cut(rng.integers(1, 9, n // BLOCK), n // BLOCK)
    begin = BLOCK * np.repeat(np.cumsum(blocks) - blocks, blocks)
    start = np.arange(0, n, BLOCK)
    return Mask(
        n, Tiles.columns(start, start + BLOCK, begin, start + BLOCK), "block_causal_document"
    )
