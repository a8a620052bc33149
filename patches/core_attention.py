"""Ring attention where Megatron's attention layers build their core attention.

Layer specifications of hybrid, heterogeneous and ModelOpt models hold the stock class as an import-time constant, so it is
replaced where it is built: in the constructors of `Attention` and `MultiLatentAttention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    for owner in (Attention, MultiLatentAttention):
        yield owner, "__init__", _with_ring(owner.__init__)


def _with_ring(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def construct(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        from cp_ring.megatron.specs import ring_submodules

        constructor(self, config, ring_submodules(submodules), *args, **kwargs)

    return construct


PATCH = Patch(
    name="core_attention",
    what="builds RingDotProductAttention in place of DotProductAttention and TEDotProductAttention in every attention layer",
    why="one flag instead of a layer specification of one's own, for every kind of model",
    replacements=_replacements,
)
