"""Keeps the ring from running again when activations are recomputed: see
`cp_ring.megatron.adapter.recomputation`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.megatron.wrapping import loaded_modules
from cp_ring.patches.patch import Patch, Replacement, replace_everywhere


def _replacements() -> Iterator[Replacement]:
    import megatron.core.extensions.transformer_engine as extensions
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    from cp_ring.megatron.adapter.recomputation import keeping

    checkpoint, te_checkpoint = random.checkpoint, getattr(extensions, "te_checkpoint", None)
    yield from replace_everywhere([tensor_parallel, random], "checkpoint", keeping(checkpoint))
    if te_checkpoint is not None:
        holders = loaded_modules("megatron.core")
        modules = [
            module for module in holders if vars(module).get("te_checkpoint") is te_checkpoint
        ]
        yield from replace_everywhere(modules, "te_checkpoint", keeping(te_checkpoint))


PATCH = Patch(
    what="keeps the results of attention for recomputed layers (--cp-ring-recompute keep)",
    why="recomputing attention would send every key around the ring a second time",
    needed=lambda args, options: options.enabled and options.recompute == "keep",
    replacements=_replacements,
)
