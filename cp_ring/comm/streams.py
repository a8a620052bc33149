"""The messages of a hop: keys and values arrive before the hop is computed, their gradients leave after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cp_ring.comm.slots import Slots
from cp_ring.comm.transport import Done, MessageBatch, Pending, Transport
from cp_ring.observe import debug
from cp_ring.observe.counters import recording
from cp_ring.ops.sums import add_, move_
from cp_ring.plan.tables import Hop, RankPlan, Transfer


class KeyStream:
    """Iterates over a rank's hops and yields (hop, keys [num_keys, b, g, d], values [num_keys, b, g, e]).

    The keys and values of later hops are received while a hop is computed, as far ahead as there are free buffers.
    Where a hop receives nothing, the yielded tensors are those of this rank's own tokens.
    """

    def __init__(
        self, rank_plan: RankPlan, transport: Transport | None, k: Tensor, v: Tensor, num_slots: int, backward: bool = False
    ):
        self._hops, self._transport, self._backward = rank_plan.backward if backward else rank_plan.hops, transport, backward
        self._slots = Slots(num_slots, rank_plan.max_keys, k, v)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {0: (k, v)}
        self._pending: list[Pending] = []

    def __iter__(self) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        for place, hop in enumerate(self._hops):
            if place == len(self._pending):
                self._post(hop)
            self._pending[place].wait()
            self._post_ahead(hop)
            for counters in recording():
                counters.hops += bool(len(hop.tiles))
            yield hop, *self._buffers.get(hop.index, self._buffers[0])
            if hop.index in self._buffers and hop.index:
                self._slots.give(self._buffers.pop(hop.index))

    def _post_ahead(self, now: Hop) -> None:
        while len(self._pending) < len(self._hops):
            hop = self._hops[len(self._pending)]
            # In backward, all ranks post their batches in one order: the keys of hop t after the gradients of hop t - 2.
            early = self._backward and hop.index > now.index + 1
            absent = any(send.buffer > now.index for send in hop.sends)
            if early or absent or (hop.receives and not self._slots.free):
                return
            self._post(hop)

    def _post(self, hop: Hop) -> None:
        if self._transport is None:
            self._pending.append(Done())
            return
        if hop.receives:
            self._buffers[hop.index] = self._slots.take(hop.num_keys)
        receives = [(receive, self._buffers[hop.index]) for receive in hop.receives]
        sends = [(send, self._buffers[send.buffer]) for send in hop.sends]
        self._pending.append(self._transport.post(MessageBatch(sends, receives, "keys", hop.index)))


class GradStream:
    """Gradients of keys and values: summed for each hop, sent to other ranks, and added to the sums of the receiver.

    A hop's messages travel while the next hop is computed, and are complete before the messages of the next hop leave. Three
    buffers are therefore enough for any number of ranks: the sum of a hop, the leaving gradients, and the arriving gradients.
    """

    def __init__(
        self, rank_plan: RankPlan, transport: Transport | None, k: Tensor, v: Tensor, sums: torch.dtype, wire_dtype: torch.dtype
    ):
        self._transport = transport
        self._home = tuple(torch.zeros_like(x, dtype=sums) for x in (k, v))
        self._sum, self._out, self._in = (
            tuple(x.new_empty((num_tokens, *x.shape[1:]), dtype=dtype) for x in (k, v))
            for num_tokens, dtype in (
                (rank_plan.max_grads, sums),
                (rank_plan.max_grads, wire_dtype),
                (rank_plan.max_grad_receives, wire_dtype),
            )
        )
        for x in self._sum:
            x.zero_()
        self._pending: Pending = Done()
        self._arriving: list[tuple[Transfer, Transfer]] = []
        self._now: tuple[int, tuple[Tensor, ...]] = (0, self._home)

    def start(self, hop: Hop) -> tuple[Tensor, ...]:
        """The buffers that the hop adds its gradients to: zeros [num_grads, b, g, d] and [num_grads, b, g, e].

        For hop 0, they are the sums of this rank's own keys and values, [s, b, g, d] and [s, b, g, e].
        """
        sums = tuple(x[: hop.num_grads] for x in self._sum) if hop.index else self._home
        self._now = (hop.index, sums)
        return sums

    def send(self, hop: Hop) -> None:
        """Adds the gradients that arrived during this hop, then posts the messages of this hop."""
        self._collect()
        if self._transport is None:
            return
        leaving = tuple(x[: hop.num_grads] for x in self._out)
        if hop.grad_sends:
            move_(*zip(leaving, self._now[1], strict=True))
        start = 0
        for transfer in hop.grad_receives:
            self._arriving.append((transfer, transfer.packed(start)))
            start += transfer.tokens
        receives = [(packed, self._in) for _, packed in self._arriving]
        debug.fill(*self._in)
        self._pending = self._transport.post(
            MessageBatch([(t, leaving) for t in hop.grad_sends], receives, "gradients", hop.index)
        )

    def finish(self) -> tuple[Tensor, ...]:
        """The gradients of this rank's own keys and values, summed over all ranks: [s, b, g, d] and [s, b, g, e]."""
        self._collect()
        return self._home

    def _collect(self) -> None:
        self._pending.wait()
        for transfer, packed in self._arriving:
            assert transfer.buffer in (0, self._now[0]), "gradients arrived for another hop than the current one"
            targets = self._now[1] if transfer.buffer else self._home
            for (first, last), (start, end) in zip(transfer.ranges, packed.ranges, strict=True):
                add_(*((target[first:last], arrived[start:end]) for target, arrived in zip(targets, self._in, strict=True)))
        self._arriving = []
