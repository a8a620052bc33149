"""The context-parallel process group beside data, tensor and pipeline groups, for use outside Megatron."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_ring.errors import ConfigError


def build_mesh(*, cp: int, tp: int = 1, pp: int = 1, dp: int | None = None, device_type: str | None = None) -> DeviceMesh:
    """A device mesh with dimensions "pp", "dp", "cp", "tp" over all ranks of the world; `mesh["cp"].get_group()` is the ring.

    Tensor ranks are neighbors, then context ranks, as in Megatron. `dp` defaults to what is left of the world. All ranks
    of the initialized world must call it. Raises `ConfigError` when the sizes do not multiply to the world size.
    """
    world = dist.get_world_size()
    for name, size in (("cp", cp), ("tp", tp), ("pp", pp), ("dp", dp)):
        if size is not None and size < 1:
            raise ConfigError(f"{name} size {size} must be at least 1")
    if dp is None and world % (cp * tp * pp):
        raise ConfigError(f"cp {cp} x tp {tp} x pp {pp} is {cp * tp * pp}, which does not divide the world of {world} ranks")
    dp = world // (cp * tp * pp) if dp is None else dp
    if cp * tp * pp * dp != world:
        raise ConfigError(f"cp {cp} x tp {tp} x pp {pp} x dp {dp} is {cp * tp * pp * dp}, but the world has {world} ranks")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))


def context_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The context-parallel group of a mesh that `build_mesh` made."""
    return mesh["cp"].get_group()
