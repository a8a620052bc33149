"""The microbatch of a probe: which tokens this rank holds, and the documents they are in, as the job's own batches would tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.megatron.certificate.layer_kinds import Kind
from cp_ring.megatron.certificate.oracle import Spans

Split = Callable[[dict[str, Tensor], int, int], dict[str, Tensor]]


@dataclass(frozen=True)
class Scene:
    """Rows of `n` tokens: the positions int64 [b, s] of those this rank holds, the spans of documents in each row, and what the
    layer gets as `packed_seq_params`; `thd` where the tensors lack the batch dimension. `edges` are positions of interest."""

    n: int
    positions: Tensor
    spans: list[Spans]
    packed: Any
    thd: bool
    edges: list[int]


def scene(kind: Kind, rank: int, cp: int, split: Split) -> Scene:
    """The scene of a probe of `kind` on rank `rank` of `cp`, whose batches are split by `split(batch, rank, cp)`."""
    make = {"causal": _causal, "documents": _documents, "packed": _packed}[kind.mask]
    made = make(kind.tokens, rank, cp, split)
    chunks = [kind.tokens * i // (2 * cp) for i in range(2 * cp)]
    bounds = [edge for spans in made.spans for span in spans for edge in span]
    window = [edge + kind.probed[0] for edge in chunks] if kind.probed[0] >= 0 else []
    near = {min(max(edge + side, 0), kind.tokens - 1) for edge in (*chunks, *bounds, *window) for side in (-1, 0, 1)}
    return Scene(made.n, made.positions, made.spans, made.packed, made.thd, sorted(near))


def _causal(n: int, rank: int, cp: int, split: Split) -> Scene:
    positions = split({"tokens": torch.arange(n)[None]}, rank, cp)["tokens"]
    return Scene(n, positions, [[(0, n)]], None, False, [])


def _documents(n: int, rank: int, cp: int, split: Split) -> Scene:
    from cp_ring.megatron.documents import DocumentParams

    rows = [cut(n, 3, seed) for seed in (1, 2)]
    stream = np.concatenate([[0], *(edges[1:] + n * row for row, edges in enumerate(rows))])
    documents = documents_in_rows(stream, len(rows), cp)
    positions = documents.shard(torch.arange(n).expand(len(rows), n), rank)
    return Scene(n, positions, [spans_of(edges) for edges in rows], DocumentParams.carry(documents), False, [])


def documents_in_rows(stream: np.ndarray, rows: int, cp: int) -> Any:
    """Documents with boundaries `stream` (as cu_seqlens) in rows of equal length, split as the settings in force say."""
    from cp_ring.megatron.documents import Documents
    from cp_ring.megatron.settings import current

    return Documents.in_rows(stream, rows, current().layout, cp)


def _packed(n: int, rank: int, cp: int, split: Split) -> Scene:
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_ring.megatron.settings import packed_in_whole_rows

    if packed_in_whole_rows():
        padded = real = cut(n, 3, 1)
        positions = _zigzag(0, n, rank, cp)
    else:
        padded = cut(n // (4 * cp), 3, 1) * (4 * cp)
        length = np.diff(padded) - np.arange(1, len(padded)) % 3 - 1  # one to three tokens of padding
        real = np.append(0, np.cumsum(length))
        ends = zip(padded[:-1].tolist(), padded[1:].tolist(), strict=True)
        positions = torch.cat([_zigzag(start, end, rank, cp) for start, end in ends])
    spans = [(int(start), int(start + size)) for start, size in zip(padded[:-1], np.diff(real), strict=True)]
    offsets = [torch.from_numpy(edges).to(torch.int32) for edges in (real, padded)]
    longest = int(np.diff(padded).max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[0], cu_seqlens_q_padded=offsets[1],
        cu_seqlens_kv_padded=offsets[1], max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
    return Scene(n, positions[None], [spans], packed, True, [])


def _zigzag(start: int, end: int, rank: int, cp: int) -> Tensor:
    """Positions of a rank where [start, end) is cut into 2 * cp chunks, of which it holds its own from the front and the back."""
    if cp == 1:
        return torch.arange(start, end)
    chunk = (end - start) // (2 * cp)
    ends = (start + chunk * rank, start + chunk * (2 * cp - 1 - rank))
    return torch.cat([torch.arange(first, first + chunk) for first in ends])


def cut(n: int, documents: int, seed: int) -> np.ndarray:
    """Offsets of a few documents of uneven length that fill n tokens."""
    random = np.random.default_rng(seed)
    inner = np.sort(random.choice(np.arange(1, n), size=min(documents, n - 1), replace=False))
    return np.array([0, *inner, n], dtype=np.int64)


def spans_of(edges: np.ndarray) -> Spans:
    """The documents [start, end) between offsets."""
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
