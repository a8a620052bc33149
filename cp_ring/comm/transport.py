"""Messages of token ranges: with NCCL on GPUs, with gloo on CPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cp_ring.comm.agreement import Agreement, shared
from cp_ring.comm.same_batch import BatchComparison
from cp_ring.errors import PlanError
from cp_ring.observe.counters import recording
from cp_ring.observe.spans import named
from cp_ring.observe.watchdog import WATCH
from cp_ring.plan.records import Transfer

Buffer = Sequence[Tensor]
"""Tensors of the same tokens, which are their first dimension: keys and values, their encoded form,
or the gradients of both.
"""


@dataclass(slots=True)
class MessageBatch:
    """The messages of a hop that are posted together: each transfer with the buffers whose tokens
    it moves.

    `ranks[peer]` is the rank of a transfer's peer in the whole job. If `ranks` is empty, the peer
    is that rank itself. `gradients` is the number of the first sends that are those of gradients
    which leave with these keys.
    """

    sends: Sequence[tuple[Transfer, Buffer]]
    receives: Sequence[tuple[Transfer, Buffer]]
    kind: str = "keys"
    hop: int = 0
    ranks: Sequence[int] = ()
    gradients: int = 0

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
    ranks make different calls, and returns what backward starts with, as `Agreement.check` does. If
    it has a method `check_batch(tensors, every)`, splits of whole tensors start with it, as
    `BatchComparison.check` does.
    """

    rank: int
    size: int

    def post(self, batch: MessageBatch) -> Pending:
        """Start all messages of a batch and return at once."""
        ...


class Joining:
    """The messages of a backward pass over a transport whose waits do not block: gradients of one
    hop and keys of a later one leave together, so that the second do not wait until the first have
    arrived.

    Batches of gradients are held until the next batch of keys, or until `leave`.
    """

    def __init__(self, transport: Transport):
        self._transport, self._held = transport, _Held()
        self.rank, self.size = transport.rank, transport.size

    def post(self, batch: MessageBatch) -> Pending:
        if not batch:
            return DONE
        if batch.kind == "gradients":
            self._held = _Held(batch)
            return self._held
        if (first := self._held.batch) is None:
            return self._transport.post(batch)
        sends, receives = [*first.sends, *batch.sends], [*first.receives, *batch.receives]
        return self._post(
            MessageBatch(sends, receives, batch.kind, batch.hop, gradients=len(first.sends))
        )

    def leave(self) -> None:
        """Post the gradients that are held, if there are any."""
        if self._held.batch is not None:
            self._post(self._held.batch)

    def _post(self, batch: MessageBatch) -> Pending:
        pending = self._held.pending = self._transport.post(batch)
        self._held.batch = None
        return pending


def joining(transport: Transport | None) -> Transport | None:
    """Return the transport of a backward pass. Where a wait blocks, as on gloo, gradients leave at
    once: a rank that this one waits for may wait for them.
    """
    if transport is None or getattr(transport, "blocks", True):
        return transport
    return Joining(transport)


@dataclass
class _Held:
    batch: MessageBatch | None = None
    pending: Pending = DONE

    def wait(self) -> None:
        assert self.batch is None, "messages that nobody has posted"
        pending, self.pending = self.pending, DONE
        pending.wait()


class GroupTransport:
    """Messages of tensors on `device` over a process group of torch: by NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        # Weak, because transports are kept for as long as their group lives.
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._agreement = shared(Agreement, group)
        self.agree = self._agreement.check
        self.check_batch = shared(BatchComparison, group).check
        self.blocks = self._tags = backend_of(group, device) == "gloo"  # NCCL has no tags

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises `PlanError` once it is destroyed."""
        group = self._group()
        if group is None:
            raise PlanError("the process group of this call was destroyed")
        return group

    def post(self, batch: MessageBatch) -> Pending:
        receives, sends = messages(batch.receives), messages(batch.sends)
        if not receives and not sends:
            return DONE
        group, tag = self.group, self._agreement.tag if self._tags else 0
        batch.ranks = self.ranks
        count(batch)
        works: list[dist.Work] = []
        with named(f"send {batch.kind}"):
            try:
                _start(works, group, receives, sends, tag)
            except RuntimeError as error:
                if not self.blocks:  # of memory, or of this rank's device
                    raise
                # of a rank that has left
                peer, _ = [*receives, *sends][len(works)]
                raise self._agreement.explain(error, [peer]) from None
        return _Works(works, batch, self._agreement.explain)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of a group for tensors on a device, "" if it has none. A group may have
    one for each type of device.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs).get(device.type, "")


def _start(
    works: list[dist.Work],
    group: dist.ProcessGroup,
    receives: _Messages,
    sends: _Messages,
    tag: int,
) -> None:
    """Start messages like `torch.distributed.batch_isend_irecv`, without its checks and objects for
    each message, which cost the host more time than the messages do. Appends to `works` the work of
    each message, or that of all.
    """
    backend: Any = group._get_backend((receives or sends)[0][1].device)
    if backend.supports_coalescing:
        backend._start_coalescing()
    for peer, part in receives:
        works.append(backend.recv([part], peer, tag))
    for peer, part in sends:
        works.append(backend.send([part], peer, tag))
    if backend.supports_coalescing:
        works[:] = [backend._end_coalescing()]


@dataclass
class _Works:
    works: list[dist.Work]
    batch: MessageBatch  # keeps its tensors alive until the messages are complete
    explain: Callable[[RuntimeError, Iterable[int]], Exception]

    def wait(self) -> None:
        works, self.works = self.works, []
        if not works:  # waited for by the other kind of messages that have left together
            return
        WATCH.begin(self.batch, works)
        done = 0
        try:
            for work in works:
                work.wait()
                done += 1
        except BaseException as error:
            WATCH.give_up()
            if isinstance(error, RuntimeError):
                sides = self.batch.receives, self.batch.sends
                peers = [peer for side in sides for peer, _ in messages(side)]
                if len(works) == len(peers):  # on gloo; NCCL has one work for all
                    peers = peers[done : done + 1]
                raise self.explain(error, peers) from None
            raise
        WATCH.end()
        self.batch = MessageBatch((), ())


_Messages = list[tuple[int, Tensor]]


def messages(transfers: Sequence[tuple[Transfer, Buffer]]) -> _Messages:
    """Return (peer, part) of each message; the part [tokens, ...] is a view of a buffer.

    Both sides use this order: by transfer, then by range, then keys before values.
    """
    return [
        (t.peer, x if end - start == x.shape[0] else x[start:end])
        for t, buffers in transfers
        for start, end in t.ranges
        for x in buffers
    ]


def count(batch: MessageBatch) -> None:
    """Add a batch to the counters that are recording."""
    for counters in recording():
        first = batch.gradients
        for kind, sent in (("gradients", batch.sends[:first]), (batch.kind, batch.sends[first:])):
            for peer, part in messages(sent):
                counters.add(kind, peer, part.nbytes)
