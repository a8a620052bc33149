"""Samples of the masks that batches may declare, for probes: what a batch carries, and by what rule
tokens see one another.

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

Spans = Sequence[tuple[int, int]]
"""Documents [start, end) of a batch row, ascending."""


def sample(name: str, n: int, seed: int) -> tuple[Mask, MaskRule]:
    """A mask of `n` tokens of the kind that `name` ends with, and the rule that it must follow;
    another one for each seed.
    """
    return _SAMPLES[name.removeprefix(PREFIX)](n, np.random.default_rng(seed))


def _tree(
    n: int, random: np.random.Generator, parents: list[int], forest: bool = True
) -> tuple[Mask, MaskRule]:
    """Branches of random lengths with these parents, and some padding behind them."""
    edges = np.append(0, _cuts(n, len(parents), random))
    lengths = np.diff(edges).tolist()
    branch = torch.full((n,), -1)
    position = torch.zeros(n, dtype=torch.int64)
    ends: list[int] = []
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for number, (parent, start, end) in enumerate(zip(parents, edges[:-1], edges[1:], strict=True)):
        branch[start:end] = number
        before = 0 if parent < 0 else ends[parent]
        position[start:end] = torch.arange(before, before + end - start)
        ends.append(before + int(end - start))
        if parent >= 0:
            ancestors[number] = ancestors[parent]
            ancestors[number, parent] = True
    position[edges[-1] :] = torch.arange(n - int(edges[-1]))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = _at(branch, query, key)
        above = ancestors.to(query.device)[of_query.clamp(min=0), of_key.clamp(min=0)]
        return (of_query >= 0) & (of_key >= 0) & (above | ((of_query == of_key) & (key <= query)))

    rule = MaskRule(sees, position, branch, tuple(edges.tolist()))
    if forest:
        return Mask.tree(parents, lengths, n), rule
    groups = [(lengths[0], lengths[1:4]), (lengths[4], lengths[5:])]
    return Mask.shared_prefix(groups, n), rule


def _images(n: int, random: np.random.Generator) -> tuple[Mask, MaskRule]:
    """Three images around a quarter, a half and three quarters of the sequence: there many layouts
    have an edge.
    """
    half = [int(size) for size in random.integers(max(n // 16, 1), max(n // 9, 2), 3)]
    spans = [(n * i // 4 - size, n * i // 4 + size // 2 + 1) for i, size in enumerate(half, 1)]
    image = torch.full((n,), -1)
    for number, (start, end) in enumerate(spans):
        image[start:end] = number

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = _at(image, query, key)
        return (key <= query) | ((of_query == of_key) & (of_query >= 0))

    return Mask.images(n, spans), _plain(sees, n, [edge for span in spans for edge in span])


def _global(n: int, random: np.random.Generator) -> tuple[Mask, MaskRule]:
    start, window = int(random.integers(n // 3, n // 2)), n // 8
    spans = [(0, 1), (start, start + 2)]
    everywhere = torch.zeros(n, dtype=torch.bool)
    for first, end in spans:
        everywhere[first:end] = True

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = _at(everywhere, query, key)
        return (key <= query) & ((query - key <= window) | of_query | of_key)

    return Mask.with_global(n, spans, (window, 0)), _plain(sees, n, [0, 1, start, start + 2])


def _blocks(n: int, random: np.random.Generator) -> tuple[Mask, MaskRule]:
    block = int(random.integers(n // 9 + 1, n // 5 + 2))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        return key // block <= query // block

    return Mask.block_causal(n, block), _plain(sees, n, range(0, n, block))


def _diffusion(n: int, random: np.random.Generator) -> tuple[Mask, MaskRule]:
    half, block = n // 2, int(random.integers(n // 16 + 1, n // 9 + 2))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        noised_query, noised_key = query >= half, key >= half
        of_query, of_key = query % half // block, key % half // block
        clean = ~noised_key & torch.where(noised_query, of_key < of_query, of_key <= of_query)
        return clean | (noised_query & noised_key & (of_query == of_key))

    positions = torch.arange(n) % half
    edges = tuple(start + side for side in (0, half) for start in range(0, half, block))
    return Mask.block_diffusion(n, block), MaskRule(sees, positions, torch.arange(n) // half, edges)


def document_rule(n: int, spans: Spans, prefixes: Sequence[int] = ()) -> MaskRule:
    """Tokens see the earlier ones of their own document [start, end), and those of its prefix, of
    the length in `prefixes`. Tokens outside all documents are padding, which neither sees nor is
    seen.
    """
    document, start, prefix = torch.full((n,), -1), *torch.zeros(2, n, dtype=torch.int64)
    for number, (first, end) in enumerate(spans):
        document[first:end], start[first:end] = number, first
        prefix[first:end] = first + (prefixes[number] if prefixes else 0)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        of_query, of_key = _at(document, query, key)
        (border,) = _at(prefix, query)
        return (of_query >= 0) & (of_query == of_key) & ((key <= query) | (key < border))

    edges = tuple(edge for span in spans for edge in span)
    return MaskRule(sees, torch.arange(n) - start, document, edges)


def _documents(
    n: int, random: np.random.Generator, prefixes: bool = False
) -> tuple[Mask, MaskRule]:
    edges = [0, *_cuts(n, 3, random).tolist(), n]
    spans = [*pairwise(edges)]
    lengths = [int(random.integers(0, end - start + 1)) * prefixes for start, end in spans]
    mask = Mask.prefix(n, lengths, edges) if prefixes else Mask.documents(edges)
    return mask, document_rule(n, spans, lengths)


def _pieces(n: int, random: np.random.Generator) -> tuple[Mask, MaskRule]:
    """Random cells of a grid, some of them cut by a diagonal band: disjoint, and like no mask with
    a name.
    """
    edges = [[0, *_cuts(n, 3, random).tolist(), n] for _ in range(2)]
    pieces = []
    for q0, q1 in pairwise(edges[0]):
        for k0, k1 in pairwise(edges[1]):
            if random.random() < 0.6:
                band = int(random.integers(-n // 2, 1)), int(random.integers(0, n // 2))
                pieces.append((q0, q1, k0, k1, *band))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        away = key - query
        allowed = torch.zeros_like(away, dtype=torch.bool)
        for q0, q1, k0, k1, lo, hi in pieces:
            picked = (query >= q0) & (query < q1)
            allowed |= picked & (key >= k0) & (key < k1) & (away >= lo) & (away <= hi)
        return allowed

    return Mask.from_pieces(n, pieces), _plain(sees, n, [edge for side in edges for edge in side])


def _at(values: Tensor, *places: Tensor) -> list[Tensor]:
    """The values of tokens at some places, on the device of these."""
    return [values.to(each.device)[each] for each in places]


def _cuts(n: int, count: int, random: np.random.Generator) -> Ints:
    """Different places between tokens, in ascending order."""
    places: Ints = np.sort(random.choice(np.arange(1, n), count, replace=False))
    return places


def _plain(sees: Callable[[Tensor, Tensor], Tensor], n: int, edges: Iterable[int]) -> MaskRule:
    """The rule of a mask whose positions are the places in the stream."""
    return MaskRule(sees, torch.arange(n), torch.zeros(n, dtype=torch.int64), tuple(edges))


_SAMPLES: dict[str, Callable[[int, np.random.Generator], tuple[Mask, MaskRule]]] = {
    "shared-prefix": lambda n, random: _tree(n, random, [-1, 0, 0, 0, -1, 4], forest=False),
    "tree": lambda n, random: _tree(n, random, [-1, 0, 1, 1, 0, -1, 5]),
    "images": _images,
    "global": _global,
    "block-causal": _blocks,
    "block-diffusion": _diffusion,
    "documents": _documents,
    "prefix": lambda n, random: _documents(n, random, prefixes=True),
    "causal": lambda n, random: (Mask.causal(n), _plain(lambda query, key: key <= query, n, [0])),
    "full": lambda n, random: (
        Mask.full(n),
        _plain(lambda query, key: (query >= 0) & (key >= 0), n, [0]),
    ),
    "any": _pieces,
}
