"""Rotary position embeddings of the tokens that a rank holds, for layouts other than zigzag."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from cp_ring.patches.patch import Patch, Replacement, replace_everywhere

_NAME = "get_pos_emb_on_this_cp_rank"


def positions_by_layout(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """The rows of `pos_emb` (the whole sequence along `seq_dim`) that this rank of `cp_group` holds under the layout in force."""
    from cp_ring.megatron.settings import current, make_layout

    layout = make_layout(current().layout, pos_emb.shape[seq_dim], cp_group.size())
    return layout.shard(pos_emb, cp_group.rank(), seq_dim)


def _replacements() -> Iterator[Replacement]:
    import megatron.core.models.common.embeddings.rope_utils
    import megatron.core.models.common.embeddings.rotary_pos_embedding
    import megatron.core.models.common.embeddings.yarn_rotary_pos_embedding  # noqa: F401

    found = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core.models") and module]
    yield from replace_everywhere(found, _NAME, positions_by_layout)


PATCH = Patch(
    name="rotary_layout",
    what=f"{_NAME} follows --cp-ring-layout",
    why="Megatron's rotary embedding assumes the zigzag split",
    package="megatron-core",
    versions=">=0.16.1,<0.20",
    replacements=_replacements,
)
