"""Lengths of packed documents, read from a file or drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints

SIGMA = 1.2
"""Of drawn lengths, which are log-normal."""


def lengths(text: str, n: int | None, seed: int = 0) -> Ints:
    """Return the lengths of documents, int64 [documents], that `text` describes: `lognormal:MEAN`,
    or a file.

    Drawn lengths sum to exactly `n`; the last document is cut there, and the same seed gives the
    same ones. A file has one number a document, separated by white space, and `n` is None or at
    least their sum. Raises `PlanError` that begins with --lengths.
    """
    kind, _, mean = text.partition(":")
    if kind != "lognormal":
        return _of_file(text, n)
    if n is None:
        raise PlanError(f"--lengths {text} needs --seq-length, the tokens of all documents")
    if not mean.isdecimal() or not int(mean):
        raise PlanError(f"--lengths {text}: give lognormal:MEAN, as in lognormal:2000")
    rng, count = np.random.default_rng(seed), 4 * n // int(mean) + 64
    drawn = rng.lognormal(np.log(int(mean)) - SIGMA**2 / 2, SIGMA, count)
    ends = np.cumsum(np.clip(drawn, 1, n).astype(np.int64))
    return np.diff([0, *ends[ends < n], n])


def _of_file(path: str, n: int | None) -> Ints:
    try:
        numbers = np.array(Path(path).read_text().split(), np.int64)
    except OSError as error:
        raise PlanError(
            f"--lengths {path}: neither lognormal:MEAN nor a file: {error.strerror}"
        ) from None
    except ValueError as error:
        raise PlanError(f"--lengths {path}: not whole numbers: {error}") from None
    if not len(numbers) or numbers.min() < 1:
        raise PlanError(f"--lengths {path}: it must have documents, each of at least 1 token")
    if n is not None and int(numbers.sum()) > n:
        raise PlanError(
            f"--lengths {path}: {len(numbers)} lengths that sum to {numbers.sum()}, for {n} tokens"
        )
    return numbers
