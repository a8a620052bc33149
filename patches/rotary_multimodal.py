"""Gives packed documents the rotary embeddings of their own tokens where positions have sections
(mrope), as those of images have.

The position ids of a microbatch are those of all its tokens, so that each token has an embedding of
its own. Megatron keeps one zigzag of them all, and then takes these for the embeddings
of the positions 0, 1, 2, ... of each document. With all of them it finds those of each document.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.patches.patch import Patch, Replacement


def _with_whole_embeddings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method of a model that asks for rotary embeddings: those of packed positions with
    sections are not split over ranks.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        from cp_ring.megatron.data.documents import ALONE

        bound = signature.bind(self, *args, **kwargs)
        packed: Any = bound.arguments.get("packed_seq_params")
        if self.position_embedding_type == "mrope" and getattr(packed, "qkv_format", "") == "thd":
            if self.config.apply_rope_fusion:
                raise ConfigError(
                    "packed documents with --position-embedding-type mrope need --no-rope-fusion "
                    "(apply_rope_fusion=False): the fused kernel gives each the positions of the "
                    "first"
                )
            packed = bound.arguments["packed_seq_params"] = copy.copy(packed)
            packed.cp_group = ALONE
        return function(*bound.args, **bound.kwargs)

    return preprocess


def _replacements() -> Iterator[Replacement]:
    from megatron.core.models.gpt import GPTModel

    yield GPTModel, "_preprocess", _with_whole_embeddings(GPTModel._preprocess)


PATCH = Patch(
    what="rotary embeddings of packed documents under --position-embedding-type mrope",
    why="Megatron splits them over ranks before it looks for those of each document: the positions "
    "are wrong without a warning",
    when="--cp-ring",
    replacements=_replacements,
)
