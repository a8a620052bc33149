"""Gives each rank the rotary position embeddings of its own tokens, for layouts other than zigzag
and for declared masks.

The tokens of a rank, or their positions, may differ between microbatches, but Megatron computes the
embeddings of a length once and keeps them. So a rank keeps the embeddings of the whole length, and
this patch selects those of the microbatch's tokens each time that the model, or a layer of
multi-latent attention, asks for embeddings.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ring.megatron.adapter.config import in_force
from cp_ring.megatron.wrapping import Function, arguments_of
from cp_ring.patches.patch import Patch

_EMBEDDINGS = "megatron.core.models.common.embeddings"
_SELECT = "cp_ring.megatron.adapter.rotary.select"


def _positions_by_layout(
    _: Function, pos_emb: torch.Tensor, seq_dim: int, cp_group: Any
) -> torch.Tensor:
    """Return the part of `pos_emb` (the whole sequence along `seq_dim`) for the tokens of this rank
    of `cp_group`.

    Returns all of `pos_emb` if the tokens are known only with the microbatch.
    """
    ring = in_force()
    if ring.by_microbatch:
        return pos_emb
    layout = ring.split.layout_of(pos_emb.shape[seq_dim], cp_group.size())
    return layout.shard(pos_emb, cp_group.rank(), seq_dim)


def _of_model(function: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a method of a model that asks for rotary embeddings and has the argument
    `packed_seq_params`.
    """
    from cp_ring.megatron.adapter.rotary import positions_in_force, tokens_of

    packed = arguments_of(function, self, *args, **kwargs).get("packed_seq_params")
    with positions_in_force(tokens_of(packed, self.pg_collection.cp)):
        return function(self, *args, **kwargs)


PATCH = Patch(
    what="rotary embeddings follow --cp-ring-layout and the masks of microbatches",
    why="Megatron's rotary embedding assumes the zigzag split, and that each position is the "
    "token's place in the sequence",
    needed=lambda args, options: (
        options.enabled and (options.mask_kinds or not options.named_layout.stock)
    ),
    wraps={
        "megatron.core.models.gpt.GPTModel._preprocess": _of_model,
        "megatron.core.models.hybrid.hybrid_model.HybridModel.forward": _of_model,
        f"{_EMBEDDINGS}.rope_utils.get_pos_emb_on_this_cp_rank": _positions_by_layout,
        f"{_EMBEDDINGS}.rotary_pos_embedding.RotaryEmbedding.forward": _SELECT,
        f"{_EMBEDDINGS}.rotary_pos_embedding.MultimodalRotaryEmbedding.forward": _SELECT,
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding.YarnRotaryEmbedding.forward": _SELECT,
    },
)
