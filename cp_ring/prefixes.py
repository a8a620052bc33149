"""Packs sequences by their common prefixes, such as the rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.errors import ConfigError, PlanError, expect, one_line
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, check_all, integer, integers

NO_LABEL = -100
"""The label of a token whose next token is not predicted, as in torch's `cross_entropy`."""


@dataclass(frozen=True, eq=False)
class PrefixPack:
    """Sequences in one stream of n tokens that stores each common prefix once.

    The token after which sequences part has several next tokens. It is stored once for each of
    them, so that every token of the stream has one label.

    tokens, labels: int64 [n]. A label is the next token; -100 at the end of a sequence and in
    padding.
    loss_mask: float32 [n], the sum of the weights of all sequences that share the label.
    indices: for each sequence the places of its tokens in the stream, int64 [its tokens].
    `x[indices[i]]` are its outputs, `x[indices[i][:-1]]` the log-probabilities of its tokens from
    the second on.
    mask: each sequence sees itself, causally.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    indices: tuple[Tensor, ...]
    mask: Mask

    @property
    def positions(self) -> Tensor:
        """The position of each token in its sequences, int64 [n]."""
        return torch.from_numpy(self.mask.positions)


def prefix_pack(
    sequences: Iterable[Sequence[int] | np.ndarray | Tensor],
    prompts: int | Sequence[int] | np.ndarray | Tensor = 0,
    weights: Sequence[float] | np.ndarray | Tensor | float = 1.0,
    multiple: int = 1,
) -> PrefixPack:
    """Pack sequences of tokens into one stream by their common prefixes, as in a trie.

        pack = prefix_pack([prompt + a, prompt + b], prompts=len(prompt), weights=[1.0, -0.5])

    Args:
        sequences: lists, arrays or tensors of token ids.
        prompts: the number of leading tokens without loss, for each sequence or for all.
        weights: the factor of each sequence's losses, or of all, such as an advantage. The sum of
            losses times `loss_mask` equals that of the separate sequences.
        multiple: the stream is padded to a multiple of this many tokens.

    Raises `PlanError` if there is no sequence, if one is empty or not a list of whole numbers, or
    if prompts and weights do not fit the sequences.
    """
    expect("sequences", sequences, Iterable)
    arrays = [integers(x, f"sequence {i}") for i, x in enumerate(sequences)]
    lengths = np.array([sequence.size for sequence in arrays])
    if not arrays or not lengths.all() or any(sequence.ndim != 1 for sequence in arrays):
        raise PlanError(
            "prefix_pack needs at least one sequence, each a list of at least one token"
        )
    if integer(multiple, "multiple") < 1:
        raise PlanError(f"multiple={multiple}: it must be at least 1 token")
    prompt, weight = integers(prompts, "prompts"), _finite(weights, "weights")
    for name, tokens_of_prompt in (("prompts", prompt), ("weights", weight)):
        if tokens_of_prompt.ndim and tokens_of_prompt.shape != lengths.shape:
            raise PlanError(
                f"{name} of shape {list(tokens_of_prompt.shape)} for {len(arrays)} sequences: it "
                "must be one number for all, or one for each"
            )
    check_all(
        (prompt >= 0) & (prompt <= lengths),
        lambda i: (
            f"sequence {i} of {lengths[i]} tokens has a prompt of "
            f"{np.broadcast_to(prompt, lengths.shape)[i]}"
        ),
    )
    paths, parents, parts = _trie(arrays)
    stored = np.concatenate(parts)
    n = -(-len(stored) // multiple) * multiple
    tokens, labels, total = np.zeros(n, np.int64), np.full(n, NO_LABEL), np.zeros(n)
    tokens[: len(stored)] = stored
    per_sequence = np.broadcast_to(prompt, len(arrays)), weight.expand(len(arrays)).tolist()
    for path, sequence, tokens_of_prompt, factor in zip(paths, arrays, *per_sequence, strict=True):
        labels[path[:-1]] = sequence[1:]
        total[path[max(tokens_of_prompt, 1) - 1 : -1]] += factor
    return PrefixPack(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(total).float(),
        tuple(map(torch.from_numpy, paths)),
        Mask.tree(parents, [len(part) for part in parts], n),
    )


def _finite(values: Any, what: str) -> Tensor:
    """Return numbers as a float64 tensor on the CPU. Raises `ConfigError` for values that are not
    finite numbers.
    """
    try:
        numbers = torch.as_tensor(values).detach().double().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{what} cannot be read as numbers: {one_line(error)}") from None
    if not bool(numbers.isfinite().all()):
        raise ConfigError(f"{what} must be finite numbers, not {numbers.flatten().tolist()[:8]}")
    return numbers


def _trie(sequences: list[Ints]) -> tuple[list[Ints], list[int], list[Ints]]:
    """Return the places of each sequence's tokens in the stream, the parents of the tree's branches
    as in `Mask.tree`, and the tokens of the branches.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    common = np.array(
        [_common(sequences[i], sequences[after]) for i, after in pairwise(order)] + [-1]
    )
    # a sequence that its successor begins with is part of that one
    whole = np.array([common[k] < len(sequences[i]) for k, i in enumerate(order)])
    leaves, common = np.array(order)[whole], common[whole]
    paths: list[Ints] = [np.empty(0, np.int64)] * len(leaves)
    parents: list[int] = []
    parts: list[Ints] = []
    end = 0
    # leaves [lo, hi), which share their first tokens; `path` has the first of them, in `parent`
    groups = [(0, len(leaves), paths[0], -1)]
    while groups:
        lo, hi, path, parent = groups.pop()
        sequence = sequences[leaves[lo]]
        shared = int(common[lo : hi - 1].min(initial=len(sequence)))
        last = shared if hi - lo == 1 else max(shared - 1, 0)
        part = sequence[len(path) : last]
        if len(part):
            parents.append(parent)
            parts.append(part)
            parent = len(parents) - 1
            path = np.concatenate([path, np.arange(end, end := end + len(part))])
        if hi - lo == 1:
            paths[lo] = path
        else:
            cuts = lo + 1 + np.flatnonzero(common[lo : hi - 1] == shared)
            edges = [lo, *cuts.tolist(), hi]
            groups += [(a, b, path, parent) for a, b in list(pairwise(edges))[::-1]]
    leaf = dict(zip(order, np.cumsum(whole) - whole, strict=True))
    return [paths[leaf[i]][: len(sequence)] for i, sequence in enumerate(sequences)], parents, parts


def _common(one: Ints, other: Ints) -> int:
    """Return how many leading tokens the two sequences share."""
    size = min(len(one), len(other))
    return int(np.append(one[:size] != other[:size], True).argmax())
