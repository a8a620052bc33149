"""Lists of document lengths, drawn so that they have quantiles that were published."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RANK_TOKENS = 16_384  # the tokens that a rank holds


@dataclass(frozen=True)
class Shape:
    """Lengths of documents. group: the context-parallel ranks of a data-parallel rank that hold the
    longest.
    """

    draw: Callable
    longest: int
    group: int = 8

    def documents(self, seed, tokens):
        """As many lengths as fit into `tokens`."""
        drawn = self.draw(np.random.default_rng(seed), 64 + tokens // 2000)
        lengths = np.clip(drawn, 64, self.longest).astype(np.int64)
        return lengths[: np.searchsorted(np.cumsum(lengths), tokens, "right")]


def _agentic(rng, count):
    lengths = rng.lognormal(np.log(24_000), 0.7, count)
    return np.where(rng.random(count) < 0.03, 131_072, lengths)


SHAPES = {
    # median 12,400, 99th percentile about 85,000 to 110,000, longest 140,000
    "fine-tuning": Shape(lambda rng, count: rng.lognormal(np.log(12_400), 0.95, count), 140_000),
    # 1,024 to 16,384
    "short": Shape(lambda rng, count: 2 ** rng.uniform(10, 14, count), 16_384, 1),
    # mean about 32,000, some of the greatest length
    "agentic": Shape(_agentic, 131_072),
}
