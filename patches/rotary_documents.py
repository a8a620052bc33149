"""Rotary position embeddings of packed documents that are split all together, as one row, over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cp_ring.patches.patch import Patch, Replacement


def _positions(cu_seqlens: torch.Tensor, rank: int, cp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's tokens under the zigzag split of the whole row: positions in the row, and in their documents."""
    from cp_ring.plan.layout import Layout

    edges = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    row = Layout.zigzag(int(edges[-1]), cp).positions(rank)
    document = np.searchsorted(edges, row, "right") - 1
    return torch.from_numpy(row), torch.from_numpy(row - edges[document])


def _replacements() -> Iterator[Replacement]:
    import megatron.core.models.common.embeddings.rope_utils as module

    def apply(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *options: Any, cp_group: Any = None, **named: Any
    ) -> torch.Tensor:
        in_row, in_document = _positions(cu_seqlens, cp_group.rank(), cp_group.size())
        wanted = in_row if freqs.shape[0] == int(cu_seqlens[-1]) else in_document
        picked = freqs.index_select(0, wanted.to(freqs.device))
        turned: torch.Tensor = module._apply_rotary_pos_emb_bshd(t.unsqueeze(1), picked, *options, **named)
        return turned.squeeze(1)

    yield module, "_apply_rotary_pos_emb_thd", apply


PATCH = Patch(
    name="rotary_documents",
    what="rotary embeddings of packed documents for --dataloader-inter-document-masking, which splits them as one row",
    why="Megatron takes every document as split for itself: wrong positions without a word, or a crash",
    replacements=_replacements,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6156",
)
