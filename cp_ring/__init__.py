"""cp_ring: context parallelism for Megatron-core, planned as data and proven before it runs."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ring.api import ring_attention
    from cp_ring.comm.groups import ALONE
    from cp_ring.comm.latent import LatentKeys
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.megatron.options import Options
    from cp_ring.plan import Layout, Mask, Plan, PlanSpec
    from cp_ring.prefixes import PrefixPack, prefix_pack
    from cp_ring.sharding import roll, shard, unshard

    __version__: str

__all__ = [
    "ALONE",
    "ConfigError",
    "KernelError",
    "LatentKeys",
    "Layout",
    "Mask",
    "Options",
    "Plan",
    "PlanError",
    "PlanSpec",
    "PrefixPack",
    "__version__",
    "prefix_pack",
    "ring_attention",
    "roll",
    "shard",
    "unshard",
]

_MODULES = {
    "ALONE": "cp_ring.comm.groups",
    "ConfigError": "cp_ring.errors",
    "KernelError": "cp_ring.errors",
    "LatentKeys": "cp_ring.comm.latent",
    "Layout": "cp_ring.plan",
    "Mask": "cp_ring.plan",
    "Options": "cp_ring.megatron.options",
    "Plan": "cp_ring.plan",
    "PlanError": "cp_ring.errors",
    "PlanSpec": "cp_ring.plan",
    "PrefixPack": "cp_ring.prefixes",
    "prefix_pack": "cp_ring.prefixes",
    "ring_attention": "cp_ring.api",
    "roll": "cp_ring.sharding",
    "shard": "cp_ring.sharding",
    "unshard": "cp_ring.sharding",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command line starts without loading torch.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "__version__":
        try:
            return importlib.metadata.version("cp-ring")
        # a checkout that is on the path without being installed
        except importlib.metadata.PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module 'cp_ring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
