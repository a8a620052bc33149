"""Samples of the masks that users declare for batches, each with the rule that it must follow.

The rules are made from first principles, token by token. They share no code with `cp_ring.Mask`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import MaskRule, document_rule, numbered
from cp_ring.plan.mask import Mask

Sample = tuple[Mask, MaskRule]


def sample(kind: str, n: int, seed: int) -> Sample:
    """Return a mask of `n` tokens of a kind of `mask_kinds`, and the rule that it must follow. Each
    seed gives another mask.
    """
    return _SAMPLES[kind](n, np.random.default_rng(seed))


def _documents(n: int, random: np.random.Generator, prefixes: bool = False) -> Sample:
    edges = [0, *_cuts(n, 3, random), n]
    spans = [*pairwise(edges)]
    lengths = [int(random.integers(0, end - start + 1)) * prefixes for start, end in spans]
    mask = Mask.prefix(n, lengths, edges) if prefixes else Mask.documents(edges)
    return mask, document_rule(n, spans, lengths)


def _tree(n: int, random: np.random.Generator, parents: list[int]) -> tuple[list[int], MaskRule]:
    """Return random lengths of branches with these parents, and their rule; padding follows the
    branches.
    """
    edges = [0, *_cuts(n, len(parents), random)]
    branch, lengths = numbered(n, [*pairwise(edges)]), np.diff(edges).tolist()
    position, ends = torch.arange(n) - edges[-1], [0] * (len(parents) + 1)  # a root begins at 0
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for number, parent in enumerate(parents):
        ends[number] = ends[parent] + lengths[number]
        position[branch == number] = torch.arange(ends[parent], ends[number])
        if parent >= 0:
            ancestors[number] |= ancestors[parent]

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = branch[query], branch[key]
        return (of_query >= 0) & (of_key >= 0) & ancestors[of_query, of_key] & (key <= query)

    return lengths, MaskRule(sees, position, branch, tuple(edges))


def _branches(n: int, random: np.random.Generator) -> Sample:
    parents = [-1, 0, 1, 1, 0, -1, 5]
    lengths, rule = _tree(n, random, parents)
    return Mask.tree(parents, lengths, n), rule


def _shared(n: int, random: np.random.Generator) -> Sample:
    lengths, rule = _tree(n, random, [-1, 0, 0, 0, -1, 4])
    groups = [(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])]
    return Mask.shared_prefix(groups, n), rule


def _images(n: int, random: np.random.Generator) -> Sample:
    """Place three images around a quarter, a half and three quarters of the sequence, where many
    layouts have an edge.
    """
    half = [int(size) for size in random.integers(max(n // 16, 1), max(n // 9, 2), 3)]
    spans = [(n * i // 4 - size, n * i // 4 + size // 2 + 1) for i, size in enumerate(half, 1)]
    image = numbered(n, spans)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | ((image[query] == image[key]) & (image[query] >= 0))

    return Mask.images(n, spans), _plain(sees, n, itertools.chain(*spans))


def _global(n: int, random: np.random.Generator) -> Sample:
    start, window = int(random.integers(n // 3, n // 2)), n // 8
    spans = [(0, 1), (start, start + 2)]
    everywhere = numbered(n, spans) >= 0

    def sees(query: Tensor, key: Tensor) -> Tensor:
        near = query - key <= window
        return (key <= query) & (near | everywhere[query] | everywhere[key])

    return Mask.with_global(n, spans, (window, 0)), _plain(sees, n, itertools.chain(*spans))


def _blocks(n: int, random: np.random.Generator) -> Sample:
    block = int(random.integers(n // 9 + 1, n // 5 + 2))
    rule = _plain(lambda query, key: key // block <= query // block, n, range(0, n, block))
    return Mask.block_causal(n, block), rule


def _diffusion(n: int, random: np.random.Generator) -> Sample:
    half, block = n // 2, int(random.integers(n // 16 + 1, n // 9 + 2))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        noised, clean = query >= half, key < half
        of_query, of_key = query % half // block, key % half // block
        return torch.where(clean, of_key < of_query + ~noised, noised & (of_key == of_query))

    edges = tuple(start + side for side in (0, half) for start in range(0, half, block))
    rule = MaskRule(sees, torch.arange(n) % half, torch.arange(n) // half, edges)
    return Mask.block_diffusion(n, block), rule


def _cuts(n: int, count: int, random: np.random.Generator) -> list[int]:
    """Return `count` different places between tokens, in ascending order."""
    return sorted(random.choice(np.arange(1, n), count, replace=False).tolist())


def _plain(sees: Callable[[Tensor, Tensor], Tensor], n: int, edges: Iterable[int]) -> MaskRule:
    """Return the rule of a mask whose positions are the indices in the stream."""
    return MaskRule(sees, torch.arange(n), torch.zeros(n, dtype=torch.int64), tuple(edges))


_SAMPLES: dict[str, Callable[[int, np.random.Generator], Sample]] = {
    "causal": lambda n, random: (Mask.causal(n), _plain(torch.ge, n, [0])),
    "full": lambda n, random: (Mask.full(n), _plain(lambda query, key: query + key >= 0, n, [0])),
    "documents": _documents,
    "prefix": lambda n, random: _documents(n, random, prefixes=True),
    "shared-prefix": _shared,
    "tree": _branches,
    "images": _images,
    "global": _global,
    "block-causal": _blocks,
    "block-diffusion": _diffusion,
    "any": _images,
}
