"""cp_ring: context parallelism for Megatron-core, planned as data and proven before it runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ring.attention import ring_attention
    from cp_ring.config import ContextParallelConfig
    from cp_ring.plan import Layout, Mask, RingPlan

__all__ = ["ContextParallelConfig", "Layout", "Mask", "RingPlan", "ring_attention"]

_HOMES = {
    "ContextParallelConfig": "cp_ring.config",
    "Layout": "cp_ring.plan",
    "Mask": "cp_ring.plan",
    "RingPlan": "cp_ring.plan",
    "ring_attention": "cp_ring.attention",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line answers at once, without loading torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cp_ring' has no attribute {name!r}")
