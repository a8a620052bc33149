"""The messages of gradients of keys and values, which leave after their hop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import override

import torch
from torch import Tensor

from cp_ring.comm.transport import DONE, Buffer, MessageBatch, Pending, Transport
from cp_ring.observe import debug
from cp_ring.observe.spans import wait_for
from cp_ring.ops.segments import Segments
from cp_ring.ops.totals import Sum
from cp_ring.plan.records import Hop, Transfer


class GradMessages(ABC):
    """Takes the partial gradients of each hop's keys and values, and sends them to the owners of
    the keys. They arrive in tensors like those of `like`, in `dtype`.

    A hop's messages travel while the next hop is computed, and are complete before the messages of
    the next hop leave. So at most three sets of gradients exist at a time, for any number of ranks:
    those of a hop, those that leave, and those that arrive.
    """

    def __init__(self, transport: Transport | None, like: Buffer, dtype: torch.dtype):
        self._transport, self._like, self._wire_dtype = transport, like, dtype
        self._sizes = [x.shape[1:] for x in like]
        self._in: Buffer = ()
        self._pending: Pending = DONE
        self._arriving: Sequence[tuple[Transfer, Transfer]] = ()

    @abstractmethod
    def start(self, hop: Hop) -> Sum:
        """Begin a hop. Returns the sum of the gradients of its keys, of one tensor [u, b, g, d] for
        keys and for values.
        """

    @abstractmethod
    def send(self, hop: Hop) -> None:
        """Add the gradients that arrived during this hop, then post the messages of this hop."""

    @abstractmethod
    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the codec's inputs, in the order of its constructor."""

    def _post(self, hop: Hop, leaving: Buffer) -> None:
        """Post the messages of a hop, once those of the previous hop have been collected."""
        assert self._transport is not None, "one rank sends no gradients"
        self._arriving = hop.arrivals
        if self._arriving:
            if not self._in or self._in[0].shape[0] != hop.num_arriving:
                self._in = ()  # before the next ones are made
                empty, dtype = self._like[0].new_empty, self._wire_dtype
                self._in = [empty((hop.num_arriving, *size), dtype=dtype) for size in self._sizes]
            debug.fill(*self._in)
        sends = [(transfer, leaving) for transfer in hop.grad_sends]
        receives = [(packed, self._in) for _, packed in self._arriving]
        self._pending = self._transport.post(MessageBatch(sends, receives, "gradients", hop.index))

    def _arrived(self) -> Sequence[tuple[Transfer, Transfer]]:
        """Wait for the messages that were posted last. Return the transfers that have arrived, and
        their places in `_in`.
        """
        wait_for(self._pending)
        self._pending = DONE  # which frees the tensors of its messages
        arrived, self._arriving = self._arriving, ()
        return arrived


class GradStream(GradMessages):
    """Gradients of keys and values: summed for each hop, sent to other ranks, and added to the sums
    of the receiver. `updates` are the updates of each hop's sums, by the index of the hop.
    """

    def __init__(
        self,
        updates: Mapping[int, Sequence[Segments]],
        transport: Transport | None,
        own: Buffer,
        wire_dtype: torch.dtype,
    ):
        super().__init__(transport, own, wire_dtype)
        self._updates = updates
        first = own[0]
        self._home = self._now = Sum(updates[0], first.shape[0], self._sizes, first, first.dtype)

    @override
    def start(self, hop: Hop) -> Sum:
        self._now = self._home
        if index := hop.index:
            like, dtype = self._like[0], self._wire_dtype
            self._now = Sum(self._updates[index], hop.num_grads, self._sizes, like, dtype)
        return self._now

    @override
    def send(self, hop: Hop) -> None:
        self._collect()
        if self._transport is not None:
            self._post(hop, tuple(self._now.finish()) if hop.grad_sends else ())

    @override
    def finish(self) -> Sequence[Tensor]:
        self._collect()
        return self._home.finish()

    def _collect(self) -> None:
        """Add the gradients that have arrived as parts of one transfer each, in the order that
        `gradient_updates` of the plan expects.
        """
        for transfer, _ in self._arrived():
            (self._now if transfer.buffer else self._home).add(*self._in)
