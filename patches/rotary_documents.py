"""Corrects the rotary position embeddings of packed documents that are split together, as one
sequence, over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cp_ring.patches.patch import Patch, Replacement


def _positions(cu_seqlens: torch.Tensor, rank: int, cp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of this rank's tokens in the whole sequence, which is split as one, and
    in their documents.
    """
    from cp_ring.megatron.data.documents import packed_layout

    edges = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    positions = packed_layout(edges, cp).positions(rank)
    document = np.searchsorted(edges, positions, "right") - 1
    return torch.from_numpy(positions), torch.from_numpy(positions - edges[document])


def _replacements() -> Iterator[Replacement]:
    import megatron.core.models.common.embeddings.rope_utils as module

    def apply(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *options: Any,
        cp_group: Any = None,
        max_seqlen: Any = None,  # since 0.20
        **named: Any,
    ) -> torch.Tensor:
        in_sequence, in_document = _positions(cu_seqlens, cp_group.rank(), cp_group.size())
        wanted = in_sequence if freqs.shape[0] == int(cu_seqlens[-1]) else in_document
        picked = freqs.index_select(0, wanted.to(freqs.device))
        turned: torch.Tensor = module._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1), picked, *options, **named
        )
        return turned.squeeze(1)

    yield module, "_apply_rotary_pos_emb_thd", apply


PATCH = Patch(
    what="corrects the rotary embeddings of packed documents that are split together as one "
    "sequence, as with --dataloader-inter-document-masking",
    why="Megatron assumes that each document is split separately: the positions are wrong without "
    "a warning, or it crashes",
    replacements=_replacements,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6156",
)
