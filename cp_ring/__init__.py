"""cp_ring: context parallelism for Megatron-core, planned as data and proven before it runs."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_ring.api import ring_attention
    from cp_ring.comm.latent import LatentKeys
    from cp_ring.comm.transport import ALONE
    from cp_ring.errors import ConfigError, KernelError, PlanError
    from cp_ring.offload import Offload
    from cp_ring.options import Options
    from cp_ring.plan import Layout, Mask, Plan, PlanSpec
    from cp_ring.rollouts import PrefixPack, logprobs, prefix_pack
    from cp_ring.sharding import convert_layout, roll, shard, unshard

    __version__: str

__all__ = [
    "ALONE",
    "ConfigError",
    "KernelError",
    "LatentKeys",
    "Layout",
    "Mask",
    "Offload",
    "Options",
    "Plan",
    "PlanError",
    "PlanSpec",
    "PrefixPack",
    "__version__",
    "convert_layout",
    "logprobs",
    "prefix_pack",
    "ring_attention",
    "roll",
    "shard",
    "unshard",
]

_MODULES = {
    "ALONE": "cp_ring.comm.transport",
    "ConfigError": "cp_ring.errors",
    "KernelError": "cp_ring.errors",
    "LatentKeys": "cp_ring.comm.latent",
    "Layout": "cp_ring.plan",
    "Mask": "cp_ring.plan",
    "Offload": "cp_ring.offload",
    "Options": "cp_ring.options",
    "Plan": "cp_ring.plan",
    "PlanError": "cp_ring.errors",
    "PlanSpec": "cp_ring.plan",
    "PrefixPack": "cp_ring.rollouts",
    "RingPlan": "cp_ring.plan",  # the name of Plan before, for one version
    "convert_layout": "cp_ring.sharding",
    "logprobs": "cp_ring.rollouts",
    "prefix_pack": "cp_ring.rollouts",
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
        return _version()
    if name in ("ContextParallelConfig", "with_ring_attention"):
        return _renamed(name)
    raise AttributeError(f"module 'cp_ring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _renamed(name: str) -> Any:
    """What had this name before, for one version. Nothing else of cp_ring alone knows Megatron."""
    if name == "ContextParallelConfig":
        from cp_ring.options import Options as value

        now = "cp_ring.Options"
    else:
        from cp_ring.megatron.specs import with_ring_attention as value  # type: ignore[assignment]

        now = "cp_ring.megatron.with_ring_attention"
    warnings.warn(f"cp_ring.{name} is {now} now", FutureWarning, stacklevel=3)
    return value


def _version() -> str:
    try:
        return importlib.metadata.version("cp-ring")
    # a checkout that is on the path without being installed
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
