"""Samples of the masks that users declare for batches, each with the rule that it must follow.

The rules are made from first principles, token by token. They share no code with `cp_ring.Mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.dense_oracle import MaskRule
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints

PREFIX = "declared "
"""How the names of such masks begin in the certificate, as in `declared shared-prefix`."""

Sample = tuple[Mask, MaskRule]


def sample(name: str, n: int, seed: int) -> Sample:
    """A mask of `n` tokens of the kind that `name` ends with, and the rule that it must follow;
    another one for each seed.
    """
    return _SAMPLES[name.removeprefix(PREFIX)](n, np.random.default_rng(seed))


def document_rule(
    n: int, spans: Sequence[tuple[int, int]], prefixes: Sequence[int] = ()
) -> MaskRule:
    """Tokens see the earlier ones of their own document [start, end), and those of its prefix, of
    the length in `prefixes`. Tokens outside all documents are padding, which neither sees nor is
    seen.
    """
    document = _numbered(n, spans)
    start = torch.tensor([*(first for first, _ in spans), 0])[document]  # 0 for padding, -1
    border = start + torch.tensor([*(prefixes or [0] * len(spans)), 0])[document]

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key, before = _at(query, document), _at(key, document), _at(query, border)
        return (of_query >= 0) & (of_query == of_key) & ((key <= query) | (key < before))

    edges = tuple(edge for span in spans for edge in span)
    return MaskRule(sees, torch.arange(n) - start, document, edges)


def _documents(n: int, random: np.random.Generator, prefixes: bool = False) -> Sample:
    edges = [0, *_cuts(n, 3, random).tolist(), n]
    spans = [*pairwise(edges)]
    lengths = [int(random.integers(0, end - start + 1)) * prefixes for start, end in spans]
    mask = Mask.prefix(n, lengths, edges) if prefixes else Mask.documents(edges)
    return mask, document_rule(n, spans, lengths)


def _tree(n: int, random: np.random.Generator, parents: list[int], forest: bool = True) -> Sample:
    """Branches of random lengths with these parents, and some padding behind them."""
    edges = [0, *_cuts(n, len(parents), random).tolist()]
    branch, lengths = _numbered(n, [*pairwise(edges)]), np.diff(edges).tolist()
    position = torch.arange(n) - edges[-1]
    ends: list[int] = []
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for number, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        before = 0 if parent < 0 else ends[parent]
        position[branch == number] = torch.arange(before, before + length)
        ends.append(before + length)
        if parent >= 0:
            ancestors[number] |= ancestors[parent]

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = _at(query, branch), _at(key, branch)
        above = ancestors.to(query.device)[of_query, of_key]
        return (of_query >= 0) & (of_key >= 0) & above & (key <= query)

    rule = MaskRule(sees, position, branch, tuple(edges))
    if forest:
        return Mask.tree(parents, lengths, n), rule
    groups = [(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])]
    return Mask.shared_prefix(groups, n), rule


def _images(n: int, random: np.random.Generator) -> Sample:
    """Three images around a quarter, a half and three quarters of the sequence: there many layouts
    have an edge.
    """
    half = [int(size) for size in random.integers(max(n // 16, 1), max(n // 9, 2), 3)]
    spans = [(n * i // 4 - size, n * i // 4 + size // 2 + 1) for i, size in enumerate(half, 1)]
    image = _numbered(n, spans)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query = _at(query, image)
        return (key <= query) | ((of_query == _at(key, image)) & (of_query >= 0))

    return Mask.images(n, spans), _plain(sees, n, [edge for span in spans for edge in span])


def _global(n: int, random: np.random.Generator) -> Sample:
    start, window = int(random.integers(n // 3, n // 2)), n // 8
    spans = [(0, 1), (start, start + 2)]
    everywhere = _numbered(n, spans) >= 0

    def sees(query: Tensor, key: Tensor) -> Tensor:
        near = query - key <= window
        return (key <= query) & (near | _at(query, everywhere) | _at(key, everywhere))

    return Mask.with_global(n, spans, (window, 0)), _plain(sees, n, [0, 1, start, start + 2])


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


def _pieces(n: int, random: np.random.Generator) -> Sample:
    """Random cells of a grid, some of them cut by a diagonal band: disjoint, and like no mask with
    a name.
    """
    edges = [[0, *_cuts(n, 3, random).tolist(), n] for _ in range(2)]
    pieces = [
        (q0, q1, k0, k1, int(random.integers(-n // 2, 1)), int(random.integers(0, n // 2)))
        for q0, q1 in pairwise(edges[0])
        for k0, k1 in pairwise(edges[1])
        if random.random() < 0.6
    ]

    def sees(query: Tensor, key: Tensor) -> Tensor:
        away = key - query
        allowed = torch.zeros_like(away, dtype=torch.bool)
        for q0, q1, k0, k1, lo, hi in pieces:
            cell = (query >= q0) & (query < q1) & (key >= k0) & (key < k1)
            allowed |= cell & (away >= lo) & (away <= hi)
        return allowed

    return Mask.from_pieces(n, pieces), _plain(sees, n, [edge for side in edges for edge in side])


def _numbered(n: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """The number of the span [start, end) that each token is in, -1 where it is in none."""
    numbers = torch.full((n,), -1)
    for number, (start, end) in enumerate(spans):
        numbers[start:end] = number
    return numbers


def _at(places: Tensor, values: Tensor) -> Tensor:
    """The values of tokens at `places`, on their device."""
    return values.to(places.device)[places]


def _cuts(n: int, count: int, random: np.random.Generator) -> Ints:
    """Different places between tokens, in ascending order."""
    places: Ints = np.sort(random.choice(np.arange(1, n), count, replace=False))
    return places


def _plain(sees: Callable[[Tensor, Tensor], Tensor], n: int, edges: Iterable[int]) -> MaskRule:
    """The rule of a mask whose positions are the places in the stream."""
    return MaskRule(sees, torch.arange(n), torch.zeros(n, dtype=torch.int64), tuple(edges))


_SAMPLES: dict[str, Callable[[int, np.random.Generator], Sample]] = {
    "causal": lambda n, random: (Mask.causal(n), _plain(lambda query, key: key <= query, n, [0])),
    "full": lambda n, random: (Mask.full(n), _plain(lambda query, key: query + key >= 0, n, [0])),
    "documents": _documents,
    "prefix": lambda n, random: _documents(n, random, prefixes=True),
    "shared-prefix": lambda n, random: _tree(n, random, [-1, 0, 0, 0, -1, 4], forest=False),
    "tree": lambda n, random: _tree(n, random, [-1, 0, 1, 1, 0, -1, 5]),
    "images": _images,
    "global": _global,
    "block-causal": _blocks,
    "block-diffusion": _diffusion,
    "any": _pieces,
}
