"""The messages of a hop: keys and values arrive before the hop is computed, their gradients leave
after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_ring.comm.slots import Buffer, Slots
from cp_ring.comm.transport import Done, MessageBatch, Pending, Transport
from cp_ring.observe import debug
from cp_ring.observe.counters import recording
from cp_ring.observe.spans import waiting
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.ops.segments import Segments
from cp_ring.ops.totals import Sum
from cp_ring.plan.tables import Hop, RankPlan, Transfer


class KeyStream:
    """Iterates over the `hops` of a rank plan, those of forward or of backward.

    It yields (hop, *tensors): the tensors of the hop's key buffer, [num_keys, ...] for each tensor
    of `own`. `own` has this rank's tokens: keys and values, or their encoded form
    (`cp_ring.comm.codecs`). While a hop is computed, the keys of later hops are received, as far
    ahead as there are free buffers. If a hop receives nothing, the yielded tensors are `own`.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        hops: Sequence[Hop],
        transport: Transport | None,
        own: Buffer,
        num_slots: int,
        backward: bool = False,
    ):
        self._hops, self._transport, self._backward = hops, transport, backward
        self._slots = Slots(num_slots, rank_plan.max_keys, own)
        self._ahead = 1 if rank_plan.forwards else num_slots - 1
        self._buffers: dict[int, Buffer] = {0: own}
        self._pending: list[Pending] = []

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for place, hop in enumerate(self._hops):
            if place == len(self._pending):
                self._post(hop)
            with waiting():
                self._pending[place].wait()
            self._post_ahead(hop)
            for counters in recording():
                counters.hops += bool(len(hop.tiles))
            yield hop, *self._buffers.get(hop.index, self._buffers[0])
            self._release(hop)

    def _release(self, hop: Hop) -> None:
        if hop.index and hop.index in self._buffers:
            del self._buffers[hop.index]
            self._slots.give(hop.index)

    def _post_ahead(self, now: Hop) -> None:
        while len(self._pending) < len(self._hops):
            hop = self._hops[len(self._pending)]
            # In backward, all ranks post their batches in one order: the keys of hop t after the
            # gradients of hop t - 1 - ahead, of which hop 0 has none.
            early = self._backward and hop.index > max(now.index, 1) + self._ahead
            absent = any(send.buffer > now.index for send in hop.sends)
            if early or absent or (hop.receives and not self._slots.free):
                return
            self._post(hop)

    def _post(self, hop: Hop) -> None:
        if self._transport is None:
            self._pending.append(Done())
            return
        if hop.receives:
            self._buffers[hop.index] = self._slots.take(hop.index, hop.num_keys)
        receives = [(receive, self._buffers[hop.index]) for receive in hop.receives]
        sends = [(send, self._buffers[send.buffer]) for send in hop.sends]
        self._pending.append(self._transport.post(MessageBatch(sends, receives, "keys", hop.index)))


class GradMessages:
    """The messages of gradients, which arrive in the tensors of `buffer`.

    A hop's messages travel while the next hop is computed, and are complete before the messages of
    the next hop leave. So at most three sets of gradients exist at a time, for any number of ranks:
    those of a hop, those that leave, and those that arrive.
    """

    def __init__(self, transport: Transport | None, buffer: Buffer):
        self._transport, self._in = transport, buffer
        self._pending: Pending = Done()
        self._posted = 0
        self._arriving: list[tuple[Transfer, Transfer]] = []

    def _post(self, hop: Hop, leaving: Buffer) -> None:
        """Post the messages of a hop, once those of the previous hop have been collected."""
        assert self._transport is not None, "one rank sends no gradients"
        start = 0
        for transfer in hop.grad_receives:
            self._arriving.append((transfer, transfer.packed(start)))
            start += transfer.tokens
        debug.fill(*self._in)
        sends = [(transfer, leaving) for transfer in hop.grad_sends]
        receives = [(packed, self._in) for _, packed in self._arriving]
        batch = MessageBatch(sends, receives, "gradients", hop.index)
        self._pending, self._posted = self._transport.post(batch), hop.index

    def _arrived(self) -> list[tuple[Transfer, Transfer]]:
        """Wait for the messages that were posted last. Return the transfers that have arrived, and
        their places in `buffer`.
        """
        with waiting():
            self._pending.wait()
        arrived, self._arriving = self._arriving, []
        return arrived


class GradStream(GradMessages):
    """Gradients of keys and values: summed for each hop, sent to other ranks, and added to the sums
    of the receiver. `updates` are the updates of each hop's sums, by the index of the hop.
    """

    def __init__(
        self, rank_plan: RankPlan, updates: Mapping[int, Sequence[Segments]],
        transport: Transport | None, own: Buffer,
        wire_dtype: torch.dtype,
    ):  # fmt: skip
        self._updates, self._like, self._wire_dtype = updates, own, wire_dtype
        super().__init__(transport, self._buffer(rank_plan.max_grad_receives, wire_dtype))
        self._home = self._now = Sum(updates[0], [x.shape for x in own], own[0], own[0].dtype)
        # Only hops of many kernel calls need sums in a wider dtype than the one that travels.
        several = any(
            segments.stays for index, of_hop in updates.items() if index for segments in of_hop
        )
        self._running = self._buffer(rank_plan.max_grads, sum_dtype(wire_dtype)) if several else ()

    def start(self, hop: Hop) -> None:
        """Begin the sums of a hop: gradients that are added from now on belong to the keys of
        `hop`.
        """
        shapes = [(hop.num_grads, *x.shape[1:]) for x in self._like]
        self._now = (
            Sum(self._updates[hop.index], shapes, self._in[0], self._wire_dtype, self._running)
            if hop.index
            else self._home
        )

    def add(self, *grads: Tensor) -> None:
        """Add the gradients of the hop's next kernel call, [u, b, g, d] for each tensor of
        `own`.
        """
        self._now.add(*grads)

    def send(self, hop: Hop) -> None:
        """Add the gradients that arrived during this hop, then post the messages of this hop."""
        self._collect()
        if self._transport is not None:
            self._post(hop, tuple(self._now.finish()) if hop.grad_sends else ())

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of this rank's own keys and values, summed over all ranks: [s, b, g,
        d] and [s, b, g, e].
        """
        self._collect()
        return self._home.finish()

    def _collect(self) -> None:
        """Add the gradients that have arrived as parts of one transfer each, in the order that
        `gradient_updates` of the plan expects.
        """
        for transfer, _ in self._arrived():
            (self._now if transfer.buffer else self._home).add(*self._in)

    def _buffer(self, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(x.new_empty((num_tokens, *x.shape[1:]), dtype=dtype) for x in self._like)
