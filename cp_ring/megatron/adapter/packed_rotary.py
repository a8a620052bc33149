"""Applies rotary position embeddings to packed documents that are split together, as one sequence,
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.adapter.documents import offsets_on_cpu, packed_layout
from cp_ring.plan.layout import Layout
from cp_ring.runtime import RUNTIME


@RUNTIME.cache(maxsize=64)
def _positions(
    edges: bytes, layout: Layout, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens in the whole sequence, which is split as one, and
    in their documents, on `device`. All layers of a microbatch share them.

    edges: int64 offsets of the documents; `layout` is theirs.
    """
    offsets, positions = np.frombuffer(edges, np.int64), layout.positions(rank)
    document = np.searchsorted(offsets, positions, "right") - 1
    both = positions, positions - offsets[document]
    return tuple(torch.from_numpy(each).to(device) for each in both)  # type: ignore[return-value]


def turned(
    turn: Callable[..., torch.Tensor],
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    *options: Any,
    cp_group: Any = None,
    max_seqlen: Any = None,  # since 0.20
    **named: Any,
) -> torch.Tensor:
    """Replace Megatron's `_apply_rotary_pos_emb_thd`. `turn` is its function for batch rows,
    `_apply_rotary_pos_emb_bshd`.
    """
    offsets = offsets_on_cpu(cu_seqlens).tobytes()
    layout = packed_layout(offsets, cp_group.size(), in_force().split)
    in_sequence, in_document = _positions(offsets, layout, cp_group.rank(), freqs.device)
    wanted = in_sequence if freqs.shape[0] == layout.n else in_document
    picked = freqs.index_select(0, wanted)
    return turn(t.unsqueeze(1), picked, *options, **named).squeeze(1)
