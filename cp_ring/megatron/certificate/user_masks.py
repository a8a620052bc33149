"""Samples of the masks that users declare for batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from cp_ring.plan.mask import Mask

TREE = [-1, 0, 1, 1, 0, -1, 5]
"""The parents of its branches."""


def sample(kind: str, n: int, seed: int) -> Mask:
    """Return a mask of `n` tokens, at least 64, of a kind of `MASK_KINDS`. Each seed gives another
    mask.
    """
    return _SAMPLES[kind](n, np.random.default_rng(seed))


def _cuts(n: int, count: int, random: np.random.Generator) -> list[int]:
    """Return 0 and `count` different places between tokens, in ascending order."""
    return [0, *sorted(random.choice(np.arange(1, n), count, replace=False).tolist())]


def _prefixes(n: int, random: np.random.Generator) -> Mask:
    edges = [*_cuts(n, 3, random), n]
    lengths = [int(random.integers(0, end - start + 1)) for start, end in pairwise(edges)]
    return Mask.prefix(n, lengths, edges)


def _shared(n: int, random: np.random.Generator) -> Mask:
    first, *lengths = np.diff(_cuts(n, 6, random)).tolist()
    return Mask.shared_prefix([(first, lengths[:3]), (lengths[3], lengths[4:])], n)


def _images(n: int, random: np.random.Generator) -> Mask:
    """Place three images around a quarter, a half and three quarters of the sequence, where many
    layouts have an edge.
    """
    sizes = random.integers(max(n // 16, 1), max(n // 9, 2), 3).tolist()
    spans = [(n * i // 4 - size, n * i // 4 + size // 2 + 1) for i, size in enumerate(sizes, 1)]
    return Mask.images(n, spans)


def _global(n: int, random: np.random.Generator) -> Mask:
    start = int(random.integers(n // 3, n // 2))
    return Mask.with_global(n, [(0, 1), (start, start + 2)], (n // 8, 0))


def _blocks(n: int, random: np.random.Generator) -> Mask:
    return Mask.block_causal(n, int(random.integers(n // 9 + 1, n // 5 + 2)))


def _diffusion(n: int, random: np.random.Generator) -> Mask:
    return Mask.block_diffusion(n, int(random.integers(n // 16 + 1, n // 9 + 2)))


_SAMPLES: dict[str, Callable[[int, np.random.Generator], Mask]] = {
    "causal": lambda n, random: Mask.causal(n),
    "full": lambda n, random: Mask.full(n),
    "documents": lambda n, random: Mask.documents([*_cuts(n, 3, random), n]),
    "prefix": _prefixes,
    "shared-prefix": _shared,
    "tree": lambda n, random: Mask.tree(TREE, np.diff(_cuts(n, len(TREE), random)), n),
    "images": _images,
    "global": _global,
    "block-causal": _blocks,
    "block-diffusion": _diffusion,
    "any": _images,
}
