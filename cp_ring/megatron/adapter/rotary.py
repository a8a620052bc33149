"""Selects the rotary embeddings of a rank's tokens: if the tokens or their positions differ between
microbatches, and for packed documents that are split together, as one sequence.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

from cp_ring.errors import ConfigError
from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import (
    ALONE,
    DocumentParams,
    Documents,
    of_offsets,
    offsets_on_cpu,
)
from cp_ring.megatron.wrapping import Function, arguments_of
from cp_ring.runtime import RUNTIME

Selected = tuple[torch.Tensor, torch.Tensor]
"""Positions of a rank's tokens, and their indices in their batch rows: int64 [n / cp, batch] each.
"""

_selected: contextvars.ContextVar[Selected | None] = contextvars.ContextVar(
    "cp_ring_positions", default=None
)


@contextmanager
def positions_in_force(selected: Selected | None) -> Iterator[None]:
    """Use the rotary embeddings of these tokens within the context; None changes nothing."""
    token = _selected.set(selected or _selected.get())
    try:
        yield
    finally:
        _selected.reset(token)


def select(forward: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the forward of a rotary embedding: select the embeddings of this rank's tokens, [n / cp,
    batch, 1, d], from [n, 1 or batch, 1, d].

    Embeddings of given `position_ids` belong to the tokens of the batch rows in order, others to
    the positions 0, 1, 2, ...
    """
    result = forward(self, *args, **kwargs)
    selected = _selected.get()
    known = arguments_of(forward, self, *args, **kwargs)
    if selected is None or known.get("packed_seq"):
        return result
    whole, *scale = result if isinstance(result, tuple) else (result,)
    index = selected["position_ids" in known].to(whole.device)
    which = torch.arange(index.shape[1], device=whole.device) if whole.shape[1] > 1 else 0
    mine = whole[index, which]
    return (mine, *scale) if isinstance(result, tuple) else mine


def tokens_of(packed: Any, group: Any) -> Selected | None:
    """Return a microbatch's tokens on this rank of `group`, or None if they are the same in every
    microbatch.
    """
    ring = in_force()
    if not ring.by_microbatch:
        return None
    if isinstance(packed, DocumentParams):
        return packed.documents.positions(group.rank()), packed.documents.places(group.rank())
    if _selected.get() is not None or group is ALONE:  # a model of its own, without masks
        return None
    raise ConfigError(
        f"{ring.expected}: a microbatch came without its documents or its mask: give the model "
        "packed_seq_params, as cp_ring.megatron.split_batch makes it"
    )


@RUNTIME.cache(maxsize=64)
def _positions(
    documents: Documents, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens in the whole sequence, which is split as one, and
    in their documents, on `device`. All layers of a microbatch share them.
    """
    in_sequence = torch.from_numpy(documents.layout.positions(rank))
    return in_sequence.to(device), documents.positions(rank).flatten().to(device)


def turn_documents(
    _: Function,
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *options: Any,
    cp_group: Any = None,
    max_seqlen: Any = None,  # since 0.20
    **named: Any,
) -> torch.Tensor:
    """Replace Megatron's `_apply_rotary_pos_emb_thd`, for documents that are split together."""
    offsets = offsets_on_cpu(cu_seqlens).tobytes()
    documents = of_offsets(offsets, offsets, cp_group.size(), in_force().split)
    in_sequence, in_document = _positions(documents, cp_group.rank(), freqs.device)
    wanted = in_sequence if freqs.shape[0] == documents.layout.n else in_document
    picked = freqs.index_select(0, wanted)
    turn = rope_utils._apply_rotary_pos_emb_bshd
    return turn(t.unsqueeze(1), picked, *options, **named).squeeze(1)
