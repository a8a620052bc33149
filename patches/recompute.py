"""Keeps the ring from running again when activations are recomputed: see
`cp_ring.megatron.adapter.recomputation`.
"""

from __future__ import annotations

from cp_ring.patches.patch import Patch

_KEEPING = "cp_ring.megatron.adapter.recomputation.keeping"


PATCH = Patch(
    what="keeps the results of attention for recomputed layers (--cp-ring-recompute keep)",
    why="recomputing attention would send every key around the ring a second time",
    needed=lambda args, options: options.enabled and options.recompute == "keep",
    wraps={
        "megatron.core.tensor_parallel.random.checkpoint": _KEEPING,
        "megatron.core.extensions.transformer_engine.te_checkpoint": _KEEPING,
    },
)
