"""Sends and receives token ranges: with NCCL on GPUs, with gloo on CPUs, and with gloo through host
memory for CUDA tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, override

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_ring.comm.agreement import agreement_of
from cp_ring.comm.same_batch import comparison_of
from cp_ring.errors import ConfigError, PlanError, expect
from cp_ring.observe.counters import recording
from cp_ring.observe.spans import named
from cp_ring.observe.watchdog import WATCH
from cp_ring.plan.layout import Layout
from cp_ring.plan.mask import Mask
from cp_ring.plan.plan import Plan
from cp_ring.plan.tables import RankPlan, Transfer
from cp_ring.runtime import RUNTIME

Buffer = Sequence[Tensor]
"""Tensors of the same tokens, which are their first dimension: keys and values, their encoded form,
or the gradients of both.
"""


@dataclass
class MessageBatch:
    """The messages of a hop that are posted together: each transfer with the buffers whose tokens
    it moves.

    `ranks[peer]` is the rank of a transfer's peer in the whole job. If `ranks` is empty, the peer
    is that rank itself.
    """

    sends: Sequence[tuple[Transfer, Buffer]]
    receives: Sequence[tuple[Transfer, Buffer]]
    kind: str = "keys"
    hop: int = 0
    ranks: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives)


class Pending(Protocol):
    """A batch of messages that was posted. After `wait`, its buffers may be read and reused (on
    CUDA by the current stream).
    """

    def wait(self) -> None: ...


class Done:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        return


DONE = Done()


class Transport(Protocol):
    """Sends and receives the messages of one rank of a context-parallel group; `rank` is its
    number, `size` the number of ranks.

    Every two ranks post the batches between them in the same order. If a transport has a method
    `agree(key, facts, every)`, each attention call starts with it; it raises `PlanError` if the
    ranks make different calls, as `Agreement.check` does. If it has a method `check_batch(tensors,
    every)`, splits of whole tensors start with it, as `BatchComparison.check` does.
    """

    rank: int
    size: int

    def post(self, batch: MessageBatch) -> Pending:
        """Start all messages of a batch and return at once."""
        ...


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


class GroupTransport:
    """Messages over a process group of torch, with the backend NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup):
        # Weak, because transports are kept for as long as their group lives.
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._agreement = agreement_of(group)
        self.agree = self._agreement.check
        self._tags = dist.get_backend(group) == "gloo"  # NCCL has none

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises `PlanError` once it is destroyed."""
        group = self._group()
        if group is None:
            raise PlanError("the process group of this call was destroyed")
        return group

    def check_batch(self, tensors: Mapping[str, Tensor], every: int) -> None:
        """Compare the tensors of a microbatch; see `BatchComparison.check`."""
        comparison_of(self.group).check(tensors, every)

    def post(self, batch: MessageBatch) -> Pending:
        receives, sends = messages(batch.receives), messages(batch.sends)
        if not receives and not sends:
            return DONE
        group, tag = self.group, self._agreement.tag if self._tags else 0
        batch.ranks = self.ranks
        count(batch)
        with named(f"send {batch.kind}"):
            return _Works(_started(group, receives, sends, tag), batch)


def _started(
    group: dist.ProcessGroup, receives: _Messages, sends: _Messages, tag: int
) -> list[dist.Work]:
    """Start messages like `torch.distributed.batch_isend_irecv`, without its checks and objects for
    each message, which cost the host more time than the messages do.
    """
    device = (receives or sends)[0][1].device

    def start() -> list[dist.Work]:
        return [
            *[group.recv([part], peer, tag) for peer, part in receives],
            *[group.send([part], peer, tag) for peer, part in sends],
        ]

    if not group._get_backend(device).supports_coalescing:
        return start()
    with dist._coalescing_manager(group, device, async_ops=True) as together:
        start()
    works: list[dist.Work] = together.works
    return works


class StagedTransport(GroupTransport):
    """A transport for CUDA tensors on a gloo group: messages pass through pinned host memory, which
    is slow.
    """

    @override
    def post(self, batch: MessageBatch) -> Pending:
        """Wait until the device has computed the tensors that are sent, then start all messages."""
        if not batch:
            return DONE
        sends = [(t.packed(), [_to_host(x, t) for x in buffers]) for t, buffers in batch.sends]
        receives = [
            (t.packed(), [_on_host(x, t) for x in buffers]) for t, buffers in batch.receives
        ]
        for device in {x.device for _, buffers in batch.sends for x in buffers}:
            torch.cuda.current_stream(device).synchronize()
        return _Staged(
            super().post(MessageBatch(sends, receives, batch.kind, batch.hop)),
            receives,
            batch.receives,
        )


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
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        if isinstance(group, DeviceMesh):
            return transport_for(_group_of_mesh(group), device)
        if hasattr(group, "rank") and hasattr(group, "size") and hasattr(group, "post"):
            return group
        raise ConfigError(_not_a_group(group))
    of_group = _transports.setdefault(group, {})
    if device.type not in of_group:
        if dist.get_rank(group) < 0:
            raise ConfigError(
                f"group does not contain this process, which is rank {dist.get_rank()} of "
                f"{dist.get_world_size()}"
            )
        backend = dist.get_backend(group)
        if device.type == "cpu" and backend == "nccl":
            raise ConfigError(
                "the context-parallel group uses NCCL, but the tensors are on the CPU; use the "
                "gloo backend"
            )
        staged = device.type == "cuda" and backend == "gloo"
        dist.all_reduce(torch.zeros(1, device="cpu" if staged else device), group=group)
        of_group[device.type] = (StagedTransport if staged else GroupTransport)(group)
    return of_group[device.type]


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
        raise ConfigError(
            f"group does not contain this process, which is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
    return mesh.get_group()


def _not_a_group(group: object) -> str:
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        return (
            f"group does not contain this process, which is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
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
    plain = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta
    if type(x) is Tensor and plain:
        return
    expect(name, x, Tensor)
    if not plain or hasattr(x, "to_local"):
        kind = type(x).__name__ if plain else f"Tensor ({x.layout}, {x.device})"
        raise ConfigError(
            f"{name} is a {kind}: pass the part of this rank that the layout says, as a plain "
            "tensor"
        )


def rank_in_job(transport: Transport | None) -> int:
    """Return this process's rank in the whole job, by which the watchdog knows it."""
    if transport is None:
        return dist.get_rank() if dist.is_initialized() else 0
    ranks = getattr(transport, "ranks", None)
    return int(transport.rank if ranks is None else ranks[transport.rank])


class _Works:
    def __init__(self, works: list[dist.Work], batch: MessageBatch):
        # The batch keeps its tensors alive until the messages are complete.
        self._works, self._batch = works, batch

    def wait(self) -> None:
        WATCH.begin(self._batch, self._works)
        try:
            for work in self._works:
                work.wait()
        except BaseException:
            WATCH.give_up()
            raise
        WATCH.end()


class _Staged:
    def __init__(
        self,
        pending: Pending,
        staged: Sequence[tuple[Transfer, Buffer]],
        wanted: Sequence[tuple[Transfer, Buffer]],
    ):
        self._pending, self._staged, self._wanted = pending, staged, wanted

    def wait(self) -> None:
        self._pending.wait()
        for (packed, sources), (transfer, targets) in zip(self._staged, self._wanted, strict=True):
            for source, target in zip(sources, targets, strict=True):
                for (first, last), (start, end) in zip(packed.ranges, transfer.ranges, strict=True):
                    target[start:end].copy_(source[first:last])


def _on_host(x: Tensor, transfer: Transfer) -> Tensor:
    """Return pinned memory for the tokens of x that the transfer moves, one range after the
    other.
    """
    return torch.empty(
        (transfer.tokens, *x.shape[1:]), dtype=x.dtype, device="cpu", pin_memory=True
    )


def _to_host(x: Tensor, transfer: Transfer) -> Tensor:
    host = _on_host(x, transfer)
    for (first, last), (start, end) in zip(transfer.packed().ranges, transfer.ranges, strict=True):
        host[first:last].copy_(x[start:end], non_blocking=True)
    return host


_Messages = list[tuple[int, Tensor]]


def messages(transfers: Sequence[tuple[Transfer, Buffer]]) -> _Messages:
    """Return (peer, part) of each message; the part [tokens, ...] is a view of a buffer.

    Both sides use this order: by transfer, then by range, then keys before values.
    """
    return [
        (t.peer, x[start:end])
        for t, buffers in transfers
        for start, end in t.ranges
        for x in buffers
    ]


def _size(transfer: Transfer, buffers: Buffer) -> int:
    return transfer.tokens * sum(x.nbytes // max(len(x), 1) for x in buffers)


def count(batch: MessageBatch) -> None:
    """Add a batch to the counters that are recording."""
    for counters in recording():
        counters.add(
            batch.kind,
            [(peer, part.nbytes) for peer, part in messages(batch.sends)],
            sum(part.nbytes for _, part in messages(batch.receives)),
        )
