"""Gives each rank the rotary position embeddings of the tokens that it holds, for layouts other than zigzag.

A balanced layout differs from microbatch to microbatch, while Megatron computes the embeddings of a length once and keeps them.
So a rank keeps the embeddings of the whole batch row, and the model selects those of the microbatch's tokens for its layers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.megatron.plans import make_layout
from cp_ring.megatron.settings import current
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere

_NAME = "get_pos_emb_on_this_cp_rank"


def positions_by_layout(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """The part of `pos_emb` (the whole sequence along `seq_dim`) for the tokens of this rank of `cp_group`.

    Under a balanced layout it is all of `pos_emb`: which tokens the rank holds is known only with the microbatch.
    """
    if current().layout == "balanced":
        return pos_emb
    layout = make_layout(current().layout, pos_emb.shape[seq_dim], cp_group.size())
    return layout.shard(pos_emb, cp_group.rank(), seq_dim)


def positions_of_microbatch(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GPTModel._preprocess`, whose second result, rotary embeddings [n, 1, 1, d], becomes [n / cp, batch, 1, d]."""

    @functools.wraps(preprocess)
    def with_positions(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        from cp_ring.megatron.documents import DocumentParams

        result = preprocess(self, *args, packed_seq_params=packed_seq_params, **kwargs)
        if current().layout != "balanced" or result[1] is None:
            return result
        if not isinstance(packed_seq_params, DocumentParams) or packed_seq_params.documents is None:
            raise ConfigError("--cp-ring-layout balanced: a microbatch came without its documents; give --cp-ring-document-mask")
        positions = packed_seq_params.documents.positions(self.pg_collection.cp.rank()).to(result[1].device)
        return result[0], result[1][positions, 0], *result[2:]

    return with_positions


def _replacements() -> Iterator[Replacement]:
    import megatron.core.models.common.embeddings.rope_utils
    import megatron.core.models.common.embeddings.rotary_pos_embedding
    import megatron.core.models.common.embeddings.yarn_rotary_pos_embedding  # noqa: F401
    from megatron.core.models.gpt import GPTModel

    found = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core.models") and module]
    yield from replace_everywhere(found, _NAME, positions_by_layout)
    yield GPTModel, "_preprocess", positions_of_microbatch(GPTModel._preprocess)


PATCH = Patch(
    name="rotary_layout",
    what=f"{_NAME} and GPTModel's rotary embeddings follow --cp-ring-layout",
    why="Megatron's rotary embedding assumes the zigzag split",
    replacements=_replacements,
)
