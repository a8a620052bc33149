"""Gives packed documents the rotary embeddings of their own tokens if positions have sections
(mrope), as positions of images have.

A microbatch has position ids for all its tokens, so each token has its own embedding. Megatron
keeps one zigzag part of these embeddings, and then treats the part as the embeddings of positions
0, 1, 2, ... of each document. From the whole embeddings it finds the right ones for each document.
"""

from __future__ import annotations

from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.megatron.wrapping import Function, arguments_of, replaced
from cp_ring.patches.patch import Patch


def _with_whole_embeddings(preprocess: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the method of a model that asks for rotary embeddings: embeddings of packed
    positions with sections stay whole instead of being split over ranks.
    """
    from cp_ring.megatron.adapter.documents import ALONE

    packed = arguments_of(preprocess, self, *args, **kwargs).get("packed_seq_params")
    if self.position_embedding_type != "mrope" or getattr(packed, "qkv_format", "") != "thd":
        return preprocess(self, *args, **kwargs)
    if self.config.apply_rope_fusion:
        raise ConfigError(
            "packed documents with --position-embedding-type mrope: the fused kernel would give "
            "every document the positions of the first one: give --no-rope-fusion "
            "(apply_rope_fusion=False)"
        )
    with replaced((packed, "cp_group", ALONE)):
        return preprocess(self, *args, **kwargs)


PATCH = Patch(
    what="corrects the rotary embeddings of packed documents with --position-embedding-type mrope",
    why="Megatron splits the embeddings over ranks before it selects those of each document, so "
    "the positions are wrong without a warning",
    wraps={
        "megatron.core.models.gpt.GPTModel._preprocess": _with_whole_embeddings,
    },
)
