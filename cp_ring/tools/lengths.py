"""Batch rows of packed documents, whose lengths are read from a file or drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.megatron.data.packing import pack
from cp_ring.plan.ranges import MAX_TOKENS, Ints

SIGMA = 1.2
"""Of drawn lengths, which are log-normal."""
MOST_ROWS = 8


def packed_rows(text: str, n: int | None) -> tuple[list[Ints], str]:
    """Return the offsets of the documents of batch rows of `n` tokens, int64 [documents + 1] each,
    and a line about them. `text` is `lognormal:MEAN`, or a file.

    Drawn lengths make one row; the last document is cut at its end, and equal arguments give the
    same ones. A file has one number a document, separated by white space. If they do not fit into
    a row, they are packed as --cp-ring-pack first-fit does, and at most `MOST_ROWS` of the rows are
    returned, evenly spaced; longer documents are cut. `n` is None for one row of all documents.
    Raises `PlanError` that begins with --lengths.
    """
    kind, _, mean = text.partition(":")
    if kind != "lognormal":
        size = _of_file(text)
        if n is None or int(size.sum()) <= n:
            return [np.cumsum([0, *size])], ""
        packed = pack(size, n, cut_long=True)
        chosen = np.unique(np.linspace(0, packed.rows - 1, MOST_ROWS).astype(int)).tolist()
        return [packed.cu_seqlens(row) for row in chosen], packed.describe()
    if n is None:
        raise PlanError(f"--lengths {text} needs --seq-length, the tokens of all documents")
    if not mean.isdecimal() or not 0 < int(mean) <= MAX_TOKENS:
        raise PlanError(f"--lengths {text}: give lognormal:MEAN, as in lognormal:2000")
    rng, count = np.random.default_rng(0), 4 * n // int(mean) + 64
    drawn = rng.lognormal(np.log(int(mean)) - SIGMA**2 / 2, SIGMA, count)
    ends = np.cumsum(np.clip(drawn, 1, n).astype(np.int64))
    return [np.array([0, *ends[ends < n], n])], ""


def _of_file(path: str) -> Ints:
    try:
        numbers = np.array(Path(path).read_text(encoding="utf-8-sig").split(), np.int64)
    except (OSError, OverflowError, ValueError) as error:
        raise PlanError(
            f"--lengths {path}: neither lognormal:MEAN nor a file of whole numbers: {error}"
        ) from None
    if not len(numbers) or numbers.min() < 1 or numbers.max() > MAX_TOKENS:
        raise PlanError(
            f"--lengths {path}: it must have documents, each of 1 to {MAX_TOKENS} tokens"
        )
    return numbers
