"""The transport of the ranks that a user passes as `group`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_ring.comm.agreement import meet_first
from cp_ring.comm.transport import (
    DONE,
    GroupTransport,
    MessageBatch,
    Pending,
    Transport,
    backend_of,
)
from cp_ring.errors import ConfigError, expect
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.records import RankPlan
from cp_ring.plan.sizes.device_rates import use
from cp_ring.runtime import RUNTIME

Group = dist.ProcessGroup | DeviceMesh | Transport | None
"""The types of the context-parallel ranks in calls; None is a single rank."""


class Alone:
    """The transport of a rank that holds the whole sequence, in a job of several ranks."""

    rank, size = 0, 1

    def post(self, batch: MessageBatch) -> Pending:
        """Return at once: there is no other rank."""
        return DONE


ALONE = Alone()
"""A group of this rank by itself."""


_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]] = RUNTIME.keep(
    weakref.WeakKeyDictionary()
)


def transport_for(group: Group, device: torch.device) -> Transport | None:
    """Return the transport of `group` for tensors on `device`. A transport is returned as it is,
    and None for a single rank.

    All ranks of the group make the first call for a type of device together, because it runs an
    all-reduce. Torch requires that all ranks take part in the first operation of a group, and a
    message between two ranks does not involve the others.

    Raises:
        ConfigError: `group` is not a group, does not contain this rank, or has a backend that
            cannot move tensors of `device`.
        PlanError: another rank does not make the call.
    """
    if group is None:
        return None
    # torch's types take the host long to recognize their objects
    if hasattr(group, "post") and hasattr(group, "rank") and hasattr(group, "size"):
        transport: Any = group
        return transport
    if isinstance(group, DeviceMesh):
        return transport_for(_group_of_mesh(group), device)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(_not_a_group(group))
    of_group, kind = _transports.setdefault(group, {}), device.type
    if kind not in of_group:
        if dist.get_rank(group) < 0:
            raise ConfigError(_not_of_the_group())
        backend = backend_of(group, device)
        if backend == "" or (kind, backend) == ("cuda", "gloo"):
            raise ConfigError(
                f"the context-parallel group moves no tensors of {kind} (its backends are "
                f"{dist.get_backend_config(group)}): make it with backend "
                f"{'nccl' if kind == 'cuda' else 'gloo'}"
            )
        choose_for(device)
        meet_first(group, device)
        of_group[kind] = GroupTransport(group, device)
    return of_group[kind]


def choose_for(device: torch.device) -> None:
    """Choose plans by the rates of `device` from now on if it is a GPU that this machine has. Ranks
    with other GPUs may choose other plans, which the first call of a kind rejects.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        use(torch.cuda.get_device_name(device))


def transport_of_call(group: Group, device: torch.device, split: object = None) -> Transport | None:
    """Return `transport_for` a group that a user passed; see `check_given` for the errors."""
    check_given(group, split)
    return transport_for(group, device)


def check_given(group: Group, split: object = None) -> None:
    """Raise `ConfigError` for None in a job of several ranks: torch's own functions take it for all
    ranks.

    `split` may be a layout or a plan; one for a single rank shows that None is meant.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        alone = isinstance(split, Layout | Plan | RankPlan) and split.cp == 1
        if ranks > 1 and not alone:
            raise ConfigError(
                f"group is not given, but this job has {ranks} ranks: give the context-parallel "
                "ones, group=dist.group.WORLD for all of them, or group=cp_ring.ALONE where each "
                "rank holds a whole sequence"
            )


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        example = "mesh['cp']" if "cp" in names or not names else f"mesh[{names[-1]!r}]"
        raise ConfigError(
            f"group is a DeviceMesh with {mesh.ndim} dimensions {names}: pass one of them, as "
            f"{example}"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(_not_of_the_group())
    return mesh.get_group()


def _not_of_the_group() -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    return f"group does not contain this process, which is rank {rank} of {size}"


def _not_a_group(group: object) -> str:
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        return _not_of_the_group()
    hints = ((Plan | RankPlan, "plan="), (Mask, "mask="), (Layout, "layout="))
    hint = next((f"; pass it as {name}" for kind, name in hints if isinstance(group, kind)), "")
    return (
        f"group is a {type(group).__name__}, not a ProcessGroup, a one-dimensional DeviceMesh, a "
        f"transport or None{hint}"
    )


def check_local(name: str, x: Any) -> None:
    """Raise `ConfigError` unless x is a plain tensor. The local part of a DTensor may be split in
    another way than the layout says.
    """
    if type(x) is Tensor and x.layout is torch.strided and not x.is_meta:
        return
    expect(name, x, Tensor)
    plain = x.layout is torch.strided and not x.is_meta
    if not plain or hasattr(x, "to_local"):
        kind = type(x).__name__ if plain else f"Tensor ({x.layout}, {x.device})"
        raise ConfigError(
            f"{name} is a {kind}: pass the part of this rank that the layout says, as a plain "
            "tensor"
        )
