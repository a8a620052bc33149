"""The messages of gradients of keys and values, which leave after their hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cp_ring.comm.transport import DONE, Buffer, MessageBatch, Pending, Transport
from cp_ring.observe import debug
from cp_ring.observe.spans import wait_for
from cp_ring.ops.segments import Segments
from cp_ring.ops.totals import Sum
from cp_ring.plan.records import Hop, Transfer

Updates = Mapping[int, Sequence[Segments]]
"""The updates of the sums of dk and dv, by the index of the hop (`cp_ring.kernels.work.Work`)."""


class GradStream:
    """Sums up the partial gradients of each hop's keys and values, and sends them to the owners of
    the keys. `own` are the keys and values of this rank. Gradients travel in `wire_dtype`: those of
    keys and values, or of what they are made from, in tensors like those of `like`.

    A hop's messages travel while the next hop is computed, and are complete before the messages of
    the next hop leave. So at most three sets of gradients exist at a time, for any number of ranks:
    those of a hop, those that leave, and those that arrive.
    """

    def __init__(
        self,
        updates: Updates,
        transport: Transport | None,
        own: Buffer,
        wire_dtype: torch.dtype,
        like: Buffer | None = None,
    ):
        self._updates, self._transport, self._own = updates, transport, own
        self._like, self._wire_dtype = like or own, wire_dtype
        self._hop_dtype = wire_dtype if like is None else own[0].dtype
        self._home = self._now = self._sum(0, len(own[0]), own[0].dtype)
        self._in: Buffer = ()
        self._pending: Pending = DONE
        self._arriving: Sequence[tuple[Transfer, Transfer]] = ()

    def _sum(self, index: int, num_tokens: int, dtype: torch.dtype) -> Sum:
        sizes = [x.shape[1:] for x in self._own]
        return Sum(self._updates[index], num_tokens, sizes, self._own[0], dtype)

    def start(self, hop: Hop) -> Sum:
        """Begin a hop. Returns the sum of the gradients of its keys, of one tensor [u, b, g, d] for
        keys and for values.
        """
        self._now, self._num_grads = self._home, hop.num_grads
        if hop.index:
            self._now = self._sum(hop.index, hop.num_grads, self._hop_dtype)
        return self._now

    def send(self, hop: Hop) -> None:
        """Add the gradients that arrived during this hop, then post the messages of this hop."""
        self._collect()
        if self._transport is None:
            return
        leaving, self._arriving = self._leaving(hop), hop.arrivals
        if self._arriving:
            if not self._in or self._in[0].shape[0] != hop.num_arriving:
                self._in = ()  # before the next ones are made
                empty, dtype = self._like[0].new_empty, self._wire_dtype
                shapes = [(hop.num_arriving, *x.shape[1:]) for x in self._like]
                self._in = [empty(shape, dtype=dtype) for shape in shapes]
            debug.fill(*self._in)
        sends = [(transfer, leaving) for transfer in hop.grad_sends]
        receives = [(packed, self._in) for _, packed in self._arriving]
        self._pending = self._transport.post(MessageBatch(sends, receives, "gradients", hop.index))

    def finish(self) -> Sequence[Tensor]:
        """Return the gradients of the codec's inputs, in the order of its constructor."""
        self._collect()
        return self._home.finish()

    def _collect(self) -> None:
        """Add the gradients that have arrived to this rank's sums, or to those that the hop passes
        on.
        """
        # Each is a part of one transfer, in the order that `gradient_updates` of the plan expects.
        for transfer, _ in self._arrived():
            (self._now if transfer.buffer else self._home).add(*self._in)

    def _leaving(self, hop: Hop) -> Buffer:
        """Return the gradients of the hop's keys, if any of them leave."""
        return self._now.finish() if hop.grad_sends else ()

    def _arrived(self) -> Sequence[tuple[Transfer, Transfer]]:
        """Wait for the messages that were posted last. Return the transfers that have arrived, and
        their places in `_in`.
        """
        wait_for(self._pending)
        self._pending = DONE  # which frees the tensors of its messages
        arrived, self._arriving = self._arriving, ()
        return arrived
