"""DTensors as inputs of attention: sharded over tokens along one dimension of their mesh, and over
batch rows or heads along others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cp_ring.errors import ConfigError
from cp_ring.plan.layout import Layout

_DIMENSIONS = {
    "bshd": {"b": 0, "s": 1, "h": 2},
    "sbhd": {"s": 0, "b": 1, "h": 2},
    "bhsd": {"b": 0, "h": 1, "s": 2},
    "thd": {"s": 0, "h": 1},
}


def on_dtensors(
    call: Callable[..., Any],
    tensors: tuple[Any, ...],
    group: Any,
    return_lse: bool,
    options: Mapping[str, Any],
) -> Any:
    """`call`, `ring_attention`, with the local parts of DTensors; out and lse are DTensors.

    The ranks are those of the dimension of the mesh over which tokens are sharded. A DTensor has
    its tokens in order, so that the layout is `contiguous` where none is given. Raises
    `ConfigError` for DTensors that are placed in another way.
    """
    form = options.get("qkv_format", "bshd")
    places = _DIMENSIONS.get(str(form), _DIMENSIONS["bshd"])
    words = ", ".join(
        f"{name} {x.placements if isinstance(x, DTensor) else 'no DTensor'}"
        for name, x in zip("qkv", tensors, strict=True)
    )
    if not all(isinstance(x, DTensor) for x in tensors):
        raise ConfigError(f"q, k and v must all be DTensors, or none; here {words}")
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    tokens = [i for i, place in enumerate(placements) if place == Shard(places["s"])]
    known = {Replicate(), *map(Shard, places.values())}
    if (
        len(tokens) != 1
        or any(x.device_mesh != mesh or x.placements != placements for x in tensors)
        or not known.issuperset(placements)
    ):
        raise ConfigError(
            f"q, k and v must be placed alike on one mesh, with {Shard(places['s'])}, their "
            "tokens, on one dimension of it, and others replicated or sharded by batch row or "
            f"head; here {words}"
        )
    of_mesh = mesh.get_group(tokens[0])
    if group is not None and _group(group) is not of_mesh:
        raise ConfigError(
            f"group is not that of dimension {tokens[0]} of the mesh, over which tokens are "
            "sharded: leave group out"
        )
    of_shards, (q, k, v) = dict(options), tensors
    cp, (n, keys) = mesh.size(tokens[0]), (x.shape[places["s"]] for x in (q, k))
    if not {"layout", "plan"} & of_shards.keys():
        of_shards["layout"] = _in_order(n, cp)
        if keys != n:
            of_shards.setdefault("key_layout", _in_order(keys, cp))
    out, lse = call(*(x.to_local() for x in tensors), of_mesh, return_lse=True, **of_shards)
    whole = DTensor.from_local(
        out, mesh, placements, run_check=False, shape=torch.Size((*q.shape[:-1], v.shape[-1])),
        stride=_strides((*q.shape[:-1], v.shape[-1])),
    )  # fmt: skip
    if not return_lse:
        return whole
    of_lse = ("h", "s") if form == "thd" else ("b", "h", "s")
    shape = torch.Size(q.shape[places[name]] for name in of_lse)
    moved: list[Placement] = [
        Shard(of_lse.index(next(name for name, dim in places.items() if dim == place.dim)))
        if isinstance(place, Shard)
        else place
        for place in placements
    ]
    return whole, DTensor.from_local(
        lse, mesh, moved, run_check=False, shape=shape, stride=_strides(shape)
    )


def _group(group: Any) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) and group.ndim == 1 else group


def _in_order(n: int, cp: int) -> Layout:
    """As torch cuts a DTensor: all parts but the last ones are of one size."""
    size = -(-n // cp)
    return Layout.from_lengths([min(size, n - i * size) for i in range(cp)])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
