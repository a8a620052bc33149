"""Makes --use-megatron-fsdp split learned sinks over tensor-parallel ranks.

Megatron's wrapper knows by class name how weights are split over these ranks, and it does not know
the class of ring attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    # Megatron up to 0.19 has one version
    wrapper = vars(adapter).get("FullyShardedDataParallelV1", adapter.FullyShardedDataParallel)
    known = wrapper._MODULE_TYPE_REGISTRY
    known = {**known, "column": {*known["column"], "RingDotProductAttention"}}
    yield wrapper, "_MODULE_TYPE_REGISTRY", known


PATCH = Patch(
    what="splits learned sinks of --use-megatron-fsdp over tensor-parallel ranks",
    why="Megatron's wrapper knows by class name how weights are split, and does not know the "
    "class of ring attention",
    needed=lambda args, options: options.enabled and args.use_megatron_fsdp,
    replacements=_replacements,
)
