"""Random documents for plans: offsets `cu_seqlens`, int64, from 0 to exactly n; the same seed gives
the same documents.
"""

import numpy as np


def exponential(n, mean, seed):
    """Documents of exponentially distributed lengths; the last one is cut at n."""
    return _offsets(np.random.default_rng(seed).exponential(mean, _enough(n, mean)), n)


def log_normal(n, mean, seed, sigma=1.2):
    """Documents of log-normally distributed lengths: most are short, a few very long."""
    lengths = np.random.default_rng(seed).lognormal(
        np.log(mean) - sigma**2 / 2, sigma, _enough(n, mean)
    )
    return _offsets(lengths, n)


def one_long(n, mean, seed):
    """One document of a quarter to three quarters of n, at a random place among short ones."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(n // 4, 3 * n // 4))
    short = np.diff(exponential(n - length, mean, seed))
    return np.cumsum([0, *np.insert(short, rng.integers(len(short) + 1), length)])


def _enough(n, mean):
    return int(4 * n / mean) + 64


def _offsets(lengths, n):
    """Offsets of documents of these lengths; the last one is cut at n."""
    ends = np.cumsum(np.clip(lengths, 1, n).astype(np.int64))
    return np.concatenate([[0], ends[ends < n], [n]])
