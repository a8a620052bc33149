"""Random documents for plans: offsets `cu_seqlens`, int64, from 0 to exactly n; the same seed gives
the same documents.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cp_ring.errors import PlanError
from cp_ring.plan.ranges import Ints


def exponential(n: int, mean: float, seed: int) -> Ints:
    """Documents of exponentially distributed lengths; the last one is cut at n."""
    if not 1 <= mean < np.inf:
        raise PlanError(
            f"documents of {mean} tokens on average: the mean must be at least 1, and finite"
        )
    return _offsets(np.random.default_rng(seed).exponential(mean, _enough(n, mean)), n)


def _conversations(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """As LongAlign has them (arXiv:2401.18058): long instructions of 8,192 to 65,536 tokens mixed
    with short ones. Assumed: a tenth are long, log-uniform; the others are log-normal with mean
    1,000 and sigma 1, at most 8,192 tokens.
    """
    short = np.minimum(_log_normal(rng, tokens, 1000, 1.0), 8192)
    long = np.exp(rng.uniform(np.log(8192), np.log(65536), len(short)))
    return np.where(rng.random(len(short)) < 0.1, long, short)


def _log_normal(rng: np.random.Generator, tokens: int, mean: float, sigma: float) -> np.ndarray:
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, _enough(tokens, mean))


LENGTHS = "--lengths"


def lengths(text: str, n: int | None, seed: int) -> Ints:
    """Lengths of documents, int64 [documents], that `text` describes: `preset:sft`,
    `lognormal:MEAN[,SIGMA]`, or a file.

    Random lengths sum to exactly `n`; the last document is cut there. A file has one number a
    document, separated by white space, and `n` is None or at least their sum. Raises `PlanError`
    that begins with --lengths.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("preset", "lognormal"):
        return _lengths_of_file(text, n)
    if n is None:
        raise PlanError(
            f"{LENGTHS} {text} needs --seq-length, the tokens of all documents together"
        )
    rng = np.random.default_rng(seed)
    if kind == "preset":
        if rest != "sft":
            raise PlanError(f"{LENGTHS} {text}: the known preset is sft")
        return np.diff(_offsets(_conversations(rng, n), n))
    try:
        mean, sigma = map(float, (rest if "," in rest else f"{rest},1.2").split(","))
    except ValueError:
        raise PlanError(
            f"{LENGTHS} {text}: give lognormal:MEAN or lognormal:MEAN,SIGMA, as in "
            "lognormal:2000,1.2"
        ) from None
    if not (1 <= mean < np.inf and 0 <= sigma <= 5):
        raise PlanError(f"{LENGTHS} {text}: the mean must be at least 1 and finite, sigma 0 to 5")
    return np.diff(_offsets(_log_normal(rng, n, mean, sigma), n))


def _lengths_of_file(path: str, n: int | None) -> Ints:
    try:
        words = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"{LENGTHS} {path}: cannot read it: {reason}") from None
    if not words:
        raise PlanError(f"{LENGTHS} {path}: there is no document")
    for number, word in enumerate(words, start=1):
        if not word.isascii() or not word.isdigit():
            raise PlanError(
                f"{LENGTHS} {path}: length {number} is {word[:40]!r}, not a whole number"
            )
        if not int(word):
            raise PlanError(f"{LENGTHS} {path}: document {number} is empty: leave it out")
    numbers = np.array([int(word) for word in words], np.int64)
    if n is not None and int(numbers.sum()) > n:
        raise PlanError(
            f"{LENGTHS} {path}: {len(numbers)} lengths that sum to {numbers.sum()}, for {n} tokens"
        )
    return numbers


def _enough(n: int, mean: float) -> int:
    return int(4 * n / mean) + 64


def _offsets(lengths: np.ndarray, n: int) -> Ints:
    """Offsets of documents of these lengths; the last one is cut at n."""
    ends = np.cumsum(np.clip(lengths, 1, n).astype(np.int64))
    return np.concatenate([[0], ends[ends < n], [n]])
