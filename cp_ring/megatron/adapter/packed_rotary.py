"""Applies rotary position embeddings to packed documents that are split together, as one sequence,
over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cp_ring.megatron.data.documents import packed_layout


def _positions(cu_seqlens: torch.Tensor, rank: int, cp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens in the whole sequence, which is split as one, and
    in their documents.
    """
    edges = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    positions = packed_layout(edges, cp).positions(rank)
    document = np.searchsorted(edges, positions, "right") - 1
    return torch.from_numpy(positions), torch.from_numpy(positions - edges[document])


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
    in_sequence, in_document = _positions(cu_seqlens, cp_group.rank(), cp_group.size())
    wanted = in_sequence if freqs.shape[0] == int(cu_seqlens[-1]) else in_document
    picked = freqs.index_select(0, wanted.to(freqs.device))
    return turn(t.unsqueeze(1), picked, *options, **named).squeeze(1)
