"""What reinforcement learning computes of rollouts: log-probabilities of labels, and sequences
packed so that what they begin with in common is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cp_ring.comm.transport import Group, GroupTransport, check_local, transport_for
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.ops.dtypes import finite, sum_dtype
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints, check_all, integer, integers

NO_LABEL = -100
"""The label of a token whose next token is not predicted, as in torch's `cross_entropy`."""


def in_chunks(
    function: Callable[..., Tensor], chunks: Iterable[tuple[Tensor, ...]], dim: int
) -> Tensor:
    """`function(*chunk)` of each chunk, joined along `dim`. Nothing that it computes is kept for
    backward, which computes it again, one chunk at a time.
    """
    if torch.is_grad_enabled():
        # Without reentry each parameter gets its gradient once, as the buckets of Megatron's
        # DistributedDataParallel expect.
        function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([function(*chunk) for chunk in chunks], dim)


@_disable_dynamo
def logprobs(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    vocab_group: Group = None,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> Tensor:
    """Log-probabilities of `labels`, [...], in float32 or float64; 0 where a label is -100.

    Every token counts for itself, so a rank passes its own shard. Labels are next tokens, which may
    be on other ranks: `cp_ring.roll(tokens, -1, ..., cu_seqlens=..., fill=-100)` makes them.

    Args:
        hidden: [..., hidden size], or logits [..., vocabulary] without `weight`.
        labels: whole numbers [...].
        weight: of the output layer, [vocabulary, hidden size]. Its gradient is this rank's share:
            sum it over the context-parallel ranks. It is summed over chunks in the dtype of
            `weight`, which may be wider than that of `hidden`.
        vocab_group: tensor-parallel ranks, a process group or a one-dimensional DeviceMesh. Each
            passes all tokens, and its part of the vocabulary (`weight` or logits), in the order of
            ranks. All get the result, and the gradient of the whole vocabulary for `hidden`.
        temperature: logits are divided by it.
        chunk: tokens of which there are logits at a time. Backward computes them again.
        entropy: the result is [2, ...], log-probabilities and entropies of the predictions. These
            are 0 too where a label is -100.

    Raises:
        ConfigError: shapes that do not fit, a label outside of the vocabulary, or an option out of
        its range.
    """
    for name, x in (("hidden", hidden), ("labels", labels), ("weight", weight)):
        if x is not None or name != "weight":
            check_local(name, x)
    expect("entropy", entropy, bool)
    if not hidden.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ConfigError(
            f"hidden of {hidden.dtype} and labels of {labels.dtype}: they must be floating-point "
            "and whole numbers"
        )
    if weight is not None and weight.shape[1:] != hidden.shape[-1:]:
        raise ConfigError(
            f"weight of shape {list(weight.shape)}: it must be [vocabulary, "
            f"{', '.join(map(str, hidden.shape[-1:]))}]"
        )
    if not hidden.dim() or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"hidden of shape {list(hidden.shape)} needs labels of shape "
            f"{list(hidden.shape[:-1])}, not {list(labels.shape)}"
        )
    if integer(chunk, "chunk") < 1:
        raise ConfigError(f"chunk={chunk}: it must be at least 1 token")
    if not 0 < expect("temperature", temperature, Real) < math.inf:
        raise ConfigError(f"temperature={temperature}: it must be a finite number above 0")
    part = (hidden if weight is None else weight.T).shape[-1]
    group, first, size = _part_of_vocabulary(part, labels, chunk, vocab_group)
    bad = labels[((labels < 0) | (labels >= size)) & (labels != NO_LABEL)]
    if len(bad):
        raise ConfigError(
            f"label {int(bad[0])}: it must be below the vocabulary's {size}, or -100 for none"
        )

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = hidden
        if weight is not None:
            logits = F.linear(_Sum.apply(hidden, None, group), weight.to(hidden.dtype))
        logits = logits.to(sum_dtype(logits.dtype)) / temperature
        return _of_logits(logits, labels, group, first, entropy)

    chunks = zip(hidden.flatten(0, -2).split(chunk), labels.flatten().split(chunk), strict=True)
    values = in_chunks(of_chunk, chunks, 1).unflatten(1, labels.shape)
    return values if entropy else values[0]


def _part_of_vocabulary(
    part: int, labels: Tensor, chunk: int, vocab_group: Group
) -> tuple[dist.ProcessGroup | None, int, int]:
    """The process group, the first label of this rank's part, and the size of the vocabulary."""
    transport = transport_for(vocab_group, labels.device)
    if transport is None:
        return None, 0, part
    if not isinstance(transport, GroupTransport):
        raise ConfigError("vocab_group must be a process group or a one-dimensional DeviceMesh")
    count = torch.arange(1, labels.numel() + 1, device=labels.device)
    facts = labels.new_zeros(3, transport.size, dtype=torch.int64)
    facts[0, transport.rank], facts[1, transport.rank] = part, chunk
    facts[2, transport.rank] = (count * (labels.flatten() + 1 - NO_LABEL)).sum()
    dist.all_reduce(facts, group=transport.group)
    if (facts[1:] != facts[1:, :1]).any():
        raise ConfigError(
            "the ranks of vocab_group pass other labels or chunks: each must pass all tokens, so "
            "gather hidden states that sequence parallelism has split"
        )
    return transport.group, int(facts[0, : transport.rank].sum()), int(facts[0].sum())


def _of_logits(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int, entropy: bool
) -> Tensor:
    """[1 or 2, tokens] of logits [tokens, part of the vocabulary]."""
    lse = logits.logsumexp(-1)
    top = lse.detach().clone()
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    share, inner = (lse - top).exp(), labels - first
    of_rank = (inner >= 0) & (inner < logits.shape[-1])
    label = logits.gather(-1, inner.where(of_rank, 0)[:, None])[:, 0].where(of_rank, 0)
    parts = [share, label]
    if entropy:
        finite = logits.masked_fill(logits == -math.inf, 0)
        parts.append(share * (logits.softmax(-1) * finite).sum(-1))
    share, label, *means = _Sum.apply(torch.stack(parts), group, None)
    lse = top + share.log()
    columns = torch.stack([label - lse, *(lse - mean / share for mean in means)])
    return columns.masked_fill(labels == NO_LABEL, 0)


class _Sum(torch.autograd.Function):
    """The sum over the ranks of `ahead`, with the gradient of one of them, because all compute the
    same loss of it; in backward the sum of gradients over those of `back`. None sums nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ahead: dist.ProcessGroup | None, back: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.back = back
        return _summed(x, ahead)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradient, ctx.back), None, None


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x.view_as(x)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


@dataclass(frozen=True, eq=False)
class PrefixPack:
    """Sequences in one stream of n tokens, in which what several of them begin with is stored once.

    A token after which sequences part has several next tokens: it is stored once for each, so that
    every token of the stream has one label.

    tokens, labels: int64 [n]. A label is the next token, -100 at the end of a sequence and in the
    padding.
    loss_mask: float32 [n], the sum of the weights of all sequences of which the label is a token.
    indices: of each sequence, where its tokens are in the stream, int64 [its tokens]: outputs
    `x[indices[i]]`, and log-probabilities of labels `x[indices[i][:-1]]` for its tokens from the
    second on.
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

    @property
    def savings(self) -> float:
        """The share of the tokens of all sequences that the stream does not have."""
        return 1 - self.mask.n / sum(map(len, self.indices))


def prefix_pack(
    sequences: Iterable[Sequence[int] | np.ndarray | Tensor],
    prompts: int | Sequence[int] | np.ndarray | Tensor = 0,
    weights: Sequence[float] | np.ndarray | Tensor | float = 1.0,
    multiple: int = 1,
) -> PrefixPack:
    """Packs sequences of tokens by their common prefixes, as a trie: prompts with several
    responses, turns that fork, equal sequences.

    `prompts` is how many tokens of each sequence, or of all, are given: their labels have no loss.
    `weights` are those of each sequence's losses, or of all, as an advantage: the sum of losses
    times `loss_mask` is that of the separate sequences. The stream is padded to a `multiple` of
    tokens, as a model wants it.

    Raises:
        PlanError: no sequence, an empty one, other things than lists of whole numbers, or prompts
        and weights that do not fit the sequences.
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
    prompt, weight = integers(prompts, "prompts"), finite(weights, "weights")
    for name, tokens_of_prompt in (("prompts", prompt), ("weights", weight)):
        if tokens_of_prompt.ndim and tokens_of_prompt.shape != lengths.shape:
            raise PlanError(
                f"{name} of shape {list(tokens_of_prompt.shape)} for {len(arrays)} sequences"
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


def _trie(sequences: list[Ints]) -> tuple[list[Ints], list[int], list[Ints]]:
    """Where each sequence's tokens are in the stream; the parents of its branches, as in
    `Mask.tree`, and their tokens.
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
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    return int(np.append(one[:size] != other[:size], True).argmax())
