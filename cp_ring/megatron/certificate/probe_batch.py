"""The microbatch of a probe: which tokens this rank holds, and the documents they are in, split as
the job splits its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.declared import sample
from cp_ring.megatron.certificate.dense_oracle import MaskRule, Spans
from cp_ring.megatron.certificate.layer_kinds import LayerKind
from cp_ring.megatron.settings import current, packed_in_whole_rows
from cp_ring.plan.mask import Mask

SplitBatch = Callable[[dict[str, Tensor], int, int], dict[str, Tensor]]
"""(tensors [b, n] by name, rank, cp) to the parts [b, s] of that rank."""


@dataclass(frozen=True)
class ProbeBatch:
    """Batch rows of `n` tokens each, split over the context-parallel ranks.

    Attributes:
        positions: where this rank's tokens are in their batch rows, int64 [b, s].
        spans: the documents of each batch row, or the rule of its mask.
        packed: what the layer gets as `packed_seq_params`.
        thd: whether the layer's tensors lack the batch dimension.
        edges: positions at which a mask is most likely wrong: beside edges of chunks, documents and
        windows.
    """

    n: int
    positions: Tensor
    spans: list[Spans | MaskRule]
    packed: Any = None
    thd: bool = False
    edges: tuple[int, ...] = ()

    def local(self, whole: Tensor) -> Tensor:
        """This rank's tokens of whole batch rows: [b, n, ...] to [b, s, ...]."""
        return torch.stack(
            [
                batch_row.index_select(0, mine)
                for batch_row, mine in zip(whole, self.positions, strict=True)
            ]
        )


def make_probe_batch(
    kind: LayerKind, rank: int, cp: int, split: SplitBatch, device: torch.device
) -> ProbeBatch:
    """The microbatch of a probe of `kind` on rank `rank` of `cp`."""
    make = {"causal": _causal, "documents": _documents, "packed": _packed}.get(kind.mask, _declared)
    made = make(kind, rank, cp, split)
    chunks = [kind.tokens * i // (2 * cp) for i in range(2 * cp)]
    bounds = [edge for spans in made.spans for edge in _edges(spans)]
    windows = [edge + kind.probed[0] for edge in chunks] if kind.probed[0] >= 0 else []
    near = {
        min(max(edge + side, 0), kind.tokens - 1)
        for edge in (*chunks, *bounds, *windows)
        for side in (-1, 0, 1)
    }
    return replace(made, positions=made.positions.to(device), edges=tuple(sorted(near)))


def _causal(kind: LayerKind, rank: int, cp: int, split: SplitBatch) -> ProbeBatch:
    whole = torch.arange(kind.tokens).expand(kind.batch_size, -1)
    return ProbeBatch(
        kind.tokens,
        split({"tokens": whole}, rank, cp)["tokens"],
        [[(0, kind.tokens)]] * kind.batch_size,
    )


def _documents(kind: LayerKind, rank: int, cp: int, split: SplitBatch) -> ProbeBatch:
    from cp_ring.megatron.data.documents import DocumentParams  # imports Megatron

    spans = [
        spans_between(random_offsets(kind.tokens, 3, seed))
        for seed in range(1, kind.batch_size + 1)
    ]
    documents = documents_of_rows(spans, kind.tokens, cp)
    positions = documents.shard(torch.arange(kind.tokens).expand(kind.batch_size, -1), rank)
    return ProbeBatch(kind.tokens, positions, list(spans), DocumentParams.carry(documents))


def _declared(kind: LayerKind, rank: int, cp: int, split: SplitBatch) -> ProbeBatch:
    from cp_ring.megatron.data.documents import DocumentParams  # imports Megatron

    masks, rules = samples_of_rows(kind)
    declared = declared_of_rows(masks, cp)
    positions = declared.shard(torch.arange(kind.tokens).expand(kind.batch_size, -1), rank)
    return ProbeBatch(kind.tokens, positions, list(rules), DocumentParams.carry(declared))


def samples_of_rows(kind: LayerKind) -> tuple[list[Mask], list[MaskRule]]:
    """A sample of the declared mask of `kind` for each batch row, and the rules of these masks."""
    made = [sample(kind.mask, kind.tokens, seed) for seed in range(1, kind.batch_size + 1)]
    return [mask for mask, _ in made], [rule for _, rule in made]


def declared_of_rows(masks: list[Mask], cp: int) -> Any:
    """The declared masks of batch rows, split as the settings in force say."""
    from cp_ring.megatron.data.masks import DeclaredMask  # imports Megatron

    return DeclaredMask.of_rows(masks, current().layout, cp)


def _edges(spans: Spans | MaskRule) -> tuple[int, ...]:
    return (
        spans.edges
        if isinstance(spans, MaskRule)
        else tuple(edge for span in spans for edge in span)
    )


def documents_of_rows(spans: list[Spans], n: int, cp: int) -> Any:
    """The documents of batch rows of `n` tokens, which `spans` fill, split as the settings in force
    say.
    """
    from cp_ring.megatron.data.documents import Documents  # imports Megatron

    ends = [end + batch_row * n for batch_row, of_row in enumerate(spans) for _, end in of_row]
    return Documents.in_rows(np.array([0, *ends], dtype=np.int64), len(spans), current().layout, cp)


def _packed(kind: LayerKind, rank: int, cp: int, split: SplitBatch) -> ProbeBatch:
    # heavy, and installed with Megatron only
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = packed_offsets(kind.tokens, cp)
    length = np.diff(padded)
    if not packed_in_whole_rows():
        length = length - np.arange(1, len(padded)) % 3 - 1  # one to three tokens of padding
    real = np.append(0, np.cumsum(length))
    spans = [
        (int(start), int(start + size)) for start, size in zip(padded[:-1], length, strict=True)
    ]
    offsets = [torch.from_numpy(edges).to(torch.int32) for edges in (real, padded)]
    longest = int(np.diff(padded).max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[0],
        cu_seqlens_q_padded=offsets[1],
        cu_seqlens_kv_padded=offsets[1], max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
    return ProbeBatch(
        kind.tokens, packed_positions(padded, rank, cp)[None], [spans], packed, thd=True
    )


def packed_offsets(n: int, cp: int) -> np.ndarray:
    """Offsets, int64, of packed documents that fill n tokens, of such lengths as the job's split
    needs.
    """
    if packed_in_whole_rows():
        return random_offsets(n, 3, 1)
    return random_offsets(n // (4 * cp), 3, 1) * (4 * cp)


def packed_positions(offsets: np.ndarray, rank: int, cp: int) -> Tensor:
    """Where the tokens of a rank are in a batch row of packed documents, int64 [s]."""
    if packed_in_whole_rows():
        if not current().named_layout.weighs:
            return _zigzag(0, int(offsets[-1]), rank, cp)
        from cp_ring.megatron.data.documents import packed_layout  # imports Megatron

        return torch.from_numpy(packed_layout(offsets, cp).positions(rank))
    ends = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.cat([_zigzag(start, end, rank, cp) for start, end in ends])


def _zigzag(start: int, end: int, rank: int, cp: int) -> Tensor:
    """Positions of a rank in [start, end) of 2 * cp chunks: each rank holds one chunk from the
    front and one from the back.
    """
    if cp == 1:
        return torch.arange(start, end)
    chunk = (end - start) // (2 * cp)
    ends = (start + chunk * rank, start + chunk * (2 * cp - 1 - rank))
    return torch.cat([torch.arange(first, first + chunk) for first in ends])


def random_offsets(n: int, cuts: int, seed: int) -> np.ndarray:
    """Offsets, int64 [cuts + 2], of documents of uneven length that fill n tokens."""
    random = np.random.default_rng(seed)
    inner = np.sort(random.choice(np.arange(1, n), size=min(cuts, n - 1), replace=False))
    return np.array([0, *inner, n], dtype=np.int64)


def spans_between(offsets: np.ndarray) -> Spans:
    """The documents [start, end) between offsets."""
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
