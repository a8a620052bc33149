"""Documents of a packed microbatch, with the mask, layout and plans that follow from their
boundaries.

A `Documents` belongs to one microbatch. It reaches each layer as an argument, inside
`packed_seq_params`. So every layer gets the documents of its own microbatch: at each pipeline
stage, in any order of microbatches, and when activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.weak import WeakTensorKeyDictionary

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.ahead import take
from cp_ring.megatron.adapter.config import RingConfig, Split, in_force
from cp_ring.megatron.adapter.microbatch_mask import MicrobatchMask
from cp_ring.plan import ranges
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.ranges import Ints
from cp_ring.runtime import RUNTIME


@dataclass(frozen=True, eq=False, repr=False)
class Documents(MicrobatchMask):
    """The documents of a microbatch. Tokens outside all documents are padding, which sees nothing
    and which nothing sees.

    key: what they are made of, by which training finds those that a worker has made.
    """

    key: Hashable = None

    @classmethod
    def in_rows(cls, cu_seqlens: Ints, batch: int, cp: int, split: Split = Split()) -> Documents:
        """Return documents without padding, each inside one batch row. `split` splits each batch
        row separately. Equal offsets give the same `Documents`.

        cu_seqlens: offsets in the stream, int64 [documents + 1], from `boundaries`.
        """
        offsets = cu_seqlens.tobytes()
        return of_offsets(offsets, offsets, cp, split, batch)

    @classmethod
    def in_thd(cls, packed: Any, tokens: int, cp: int, split: Split | None = None) -> Documents:
        """Return the documents of Megatron's `PackedSeqParams` with qkv_format thd; each of `cp`
        ranks holds `tokens` tokens.

        `split` splits all documents together, as one sequence; without it each document is split
        over the ranks separately (per-document zigzag). Raises `ConfigError` if the parameters
        contradict each other or the tensors, and for cross attention.
        """
        if packed.qkv_format != "thd":
            raise ConfigError(
                f"packed_seq_params.qkv_format {packed.qkv_format!r}: --cp-ring supports thd only: "
                "give thd"
            )
        if packed.local_cp_size not in (None, cp):
            raise ConfigError(
                f"packed_seq_params.local_cp_size {packed.local_cp_size}: this layer runs on all "
                f"{cp} context-parallel ranks; only attention and multi-token prediction run on "
                "fewer"
            )
        real = _common_offsets(packed, "cu_seqlens_q", "cu_seqlens_kv")
        padded = _common_offsets(packed, "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        found = [offsets for offsets in (real, padded) if offsets is not None]
        if not found:
            raise ConfigError(
                "packed_seq_params has no cu_seqlens_q: give the offsets of its documents"
            )
        real = found[0]
        padded = found[-1]
        length = np.diff(real)
        room = np.diff(padded)
        if len(length) != len(room) or (length > room).any():
            raise ConfigError(
                f"packed_seq_params: documents of {_shorten(length)} tokens do not fit into padded "
                f"ones of {_shorten(room)}"
            )
        if padded[-1] != tokens * cp:
            raise ConfigError(
                f"packed_seq_params: cu_seqlens end at {padded[-1]}, but the {cp} ranks of "
                f"--context-parallel-size hold {tokens} tokens each, {tokens * cp} together"
            )
        return of_offsets(real.tobytes(), padded.tobytes(), cp, split)


@dataclass(kw_only=True)
class DocumentParams(PackedSeqParams):
    """Carries the documents or the mask of a microbatch in sbhd as the argument that Megatron
    passes to every layer and to recomputation.
    """

    documents: MicrobatchMask

    @classmethod
    def carry(cls, documents: MicrobatchMask) -> DocumentParams:
        # of a layout that is the same in every microbatch, Megatron takes a part of a batch row's
        # embeddings
        n = documents.longest if in_force().by_microbatch else documents.row
        return cls(qkv_format="sbhd", max_seqlen_q=n, max_seqlen_kv=n, documents=documents)


def thd_params(real: torch.Tensor, padded: torch.Tensor, cp_group: Any = None) -> PackedSeqParams:
    """Return Megatron's parameters of packed documents from their offsets, int32 [documents + 1],
    without and with padding.
    """
    longest = int(padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=cp_group,
    )


class _OneRank:
    """Stands for the process group of this rank alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


ALONE = _OneRank()


def group_of_microbatch(packed: Any, group: Any) -> Any:
    """Return the group of ranks that share a microbatch: the one in `packed` (packed_seq_params),
    else `group`, the context-parallel one. None means this rank alone.
    """
    size = packed and packed.local_cp_size
    own = packed and packed.cp_group
    group = group or ALONE
    if own is None:
        own = ALONE if size == 1 else group
    if own is not group and own.size() == group.size():
        ranks: Any = torch.distributed.get_process_group_ranks
        own = group if own.size() == 1 or ranks(own) == ranks(group) else own
    if size is not None and size != own.size():
        raise ConfigError(
            f"packed_seq_params.local_cp_size is {size}, but its cp_group, by default the "
            f"context-parallel one, has {own.size()} ranks: give the group of the microbatch"
        )
    return own


def without_whole_rows(packed: Any, n: int) -> Any:
    """Return None if `packed` (packed_seq_params) only says, in sbhd, that each batch row of `n`
    tokens is one document; else return `packed`.
    """
    if packed is None or isinstance(packed, DocumentParams) or packed.qkv_format != "sbhd":
        return packed
    offsets = _common_offsets(packed, "cu_seqlens_q", "cu_seqlens_kv")
    return None if offsets is None or (np.diff(offsets) == n).all() else packed


def documents_of(
    packed: Any, shape: tuple[int, int], cp: int, ring: RingConfig = RingConfig()
) -> MicrobatchMask:
    """Return the documents, or the declared mask, that `packed` (packed_seq_params) describes now;
    for None, batch rows that are one document each.

    shape: the numbers of batch rows and of tokens of each that this rank holds.
    ring: how rows and documents in thd are split; others carry their split.

    Equal offsets give the same `Documents`, so that all layers of a microbatch share its plans. If
    `packed` is reused with other offsets, filled in place or replaced, it gives other documents.
    Raises `ConfigError` if the tokens contradict `packed`.
    """
    batch, row = shape
    tokens = batch * row
    if packed is None:
        return Documents.in_rows(np.arange(batch + 1) * row * cp, batch, cp, ring.split)
    if not isinstance(packed, DocumentParams):
        return Documents.in_thd(packed, tokens, cp, ring.split_of_packed)
    documents = packed.documents
    if documents.layout.n != tokens * cp or documents.layout.cp != cp:
        raise ConfigError(
            f"{documents.origin}: the boundaries are for {documents.layout.n} tokens over "
            f"{documents.layout.cp} ranks, the tensors hold {tokens} on each of {cp}"
        )
    return documents


def boundaries(position_ids: torch.Tensor) -> Ints:
    """Return the offsets of the documents in the stream of all batch rows: cu_seqlens int64
    [documents + 1].

    position_ids: [batch, n], or [3, batch, n] of positions with sections, on the CPU. They restart
        at 0 in each document: at the start of each batch row, and after every end-of-document
        token, which belongs to the document that it ends.
    """
    first = (position_ids == 0).view(-1, *position_ids.shape[-2:]).all(0)
    if not bool(first[:, 0].all()):
        raise ConfigError(
            "--cp-ring-document-mask: the position ids of a batch row do not begin at 0; they "
            "must come from a GPT data set"
        )
    return np.append(np.flatnonzero(first.reshape(-1).numpy()), first.numel()).astype(np.int64)


def _common_offsets(packed: Any, *names: str) -> Ints | None:
    """Return the offsets on the CPU, which must be equal for queries and keys; None if `packed` has
    neither.
    """
    queries, keys = (getattr(packed, name, None) for name in names)
    if queries is None and keys is None:
        return None
    if queries is None or keys is None:
        raise ConfigError(
            f"packed_seq_params has only {names[0] if keys is None else names[1]}: give both "
            f"{names[0]} and {names[1]}"
        )
    offsets = offsets_on_cpu(queries)
    if keys is not queries and not np.array_equal(offsets, offsets_on_cpu(keys)):
        raise ConfigError(
            f"packed_seq_params: {names[0]} and {names[1]} differ; --cp-ring supports self "
            "attention only"
        )
    if len(offsets) < 2:
        raise ConfigError(f"packed_seq_params: {names[0]} {_shorten(offsets)} must hold a document")
    return ranges.offsets(offsets, f"packed_seq_params: {names[0]}")


@RUNTIME.cache(maxsize=64)
def of_offsets(
    real: bytes, padded: bytes, cp: int, split: Split | None, batch: int = 1
) -> Documents:
    """Return the documents of checked int64 offsets, without and with padding. `split` splits each
    batch row; without it each document is split separately. The cache holds far more entries than
    there are microbatches in flight. Those that a worker has made are taken from there.
    """
    key = real, padded, cp, split, batch
    if arrived := take(key):
        return arrived
    starts = np.frombuffer(padded, np.int64)
    length = np.diff(np.frombuffer(real, np.int64))
    n = int(starts[-1]) // batch
    if split is None and cp > 1:
        layout = Layout.per_document_zigzag(starts, cp)
    else:
        split = split or Split()
        rows = []
        for first in range(0, n * batch, n):
            edges = np.unique(starts[(starts >= first) & (starts <= first + n)] - first)
            rows.append(split.layout_of(n, cp, partial(Mask.documents, edges, True)))
        layout = rows[0] if batch == 1 else Layout.batch(rows)
    # padding behind a document is a document too; the next line hides it
    edges = np.append(np.stack([starts[:-1], starts[:-1] + length], axis=1), layout.n)
    mask = Mask.documents(edges, False)
    seen = np.isin(mask.pieces.q0, starts[:-1][length > 0])
    return Documents(replace(mask, pieces=mask.pieces[seen]), layout, batch, key=key)


_read: WeakTensorKeyDictionary = RUNTIME.keep(WeakTensorKeyDictionary())
"""The version and the values of each device tensor that was read, because a read makes the host
wait for the device.
"""


def offsets_on_cpu(offsets: torch.Tensor) -> Ints:
    """Return the values of a tensor, int64 on the host.

    A CPU tensor is read each time. A device tensor is read again when its version counter has
    changed. The counter sees in-place operations of torch, also through views, but not writes
    through `Tensor.data` or a raw pointer.
    """
    if offsets.device.type == "cpu" or offsets.is_inference():
        return _values(offsets)
    version, values = _read.get(offsets, (-1, None))
    if version != offsets._version:
        version, values = _read[offsets] = offsets._version, _values(offsets)
    return values


def _values(offsets: torch.Tensor) -> Ints:
    return ranges.integers(offsets, "packed_seq_params: cu_seqlens").reshape(-1)


def _shorten(values: Ints) -> str:
    return np.array2string(values, threshold=8, edgeitems=3)
