"""The messages of keys and values, which arrive before their hop is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cp_ring.comm.transport import DONE, Buffer, Joining, MessageBatch, Pending, Transport
from cp_ring.observe import debug
from cp_ring.observe.counters import recording
from cp_ring.observe.spans import wait_for
from cp_ring.plan.records import Turn


class KeyStream:
    """Iterates over the hops of an order.

    It yields (hop, *tensors): the tensors of the hop's key buffer, [num_keys, ...] for each tensor
    of `own`. `own` has this rank's tokens: keys and values, or their encoded form
    (`cp_ring.comm.codecs`). While a hop is computed, the keys of later hops are received. If a hop
    receives nothing, the yielded tensors are `own`.
    """

    def __init__(self, order: Sequence[Turn], transport: Transport | None, own: Buffer):
        self._order, self._transport = order, transport
        # The buffers by slot; slot 0 is `own`. The others exist from the messages of a hop to its
        # end, each with the tokens of its hop.
        self._slots = {0: own}
        # The last hop's buffer, which the next messages may fill: it is sent on by the messages of
        # this hop alone, which have been waited for.
        self._spare: Buffer = ()
        self._recording = recording()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        pending = list[Pending]()
        # In backward, the gradients of the last hop, unless they leave with keys.
        leave = self._transport.leave if isinstance(self._transport, Joining) else None
        for place, (hop, slot, _, ahead) in enumerate(self._order):
            self._post(pending, place + 1)
            if pending[place] is not DONE:
                wait_for(pending[place])
            pending[place] = DONE  # which frees the tensors of its messages
            # A GPU's kernels are only launched here: those of the rank's own keys, which wait for
            # nothing, go before the first messages. A CPU computes them first, so they go after.
            if slot or not self._slots[0][0].is_cuda:
                self._post(pending, ahead)
            if leave:
                leave()
            self._spare = ()
            for counters in self._recording:
                counters.hops += bool(len(hop.tiles))
            yield hop, *self._slots[slot]
            self._post(pending, ahead)
            if slot:
                self._spare = self._slots.pop(slot)
                for counters in self._recording:
                    counters.slot(-1)
        if leave:
            leave()

    def _post(self, pending: list[Pending], ahead: int) -> None:
        """Post the messages of the first hops, up to `ahead`."""
        while len(pending) < ahead:
            pending.append(self._posted(self._order[len(pending)]))

    def _posted(self, turn: Turn) -> Pending:
        """Post the messages of a hop."""
        (hop, slot, sent, _), slots = turn, self._slots
        if self._transport is None or not (slot or sent):
            return DONE
        buffer: Buffer = ()
        if slot:
            buffer = slots[slot] = self._allocated(hop.num_keys)
            debug.fill(*buffer)
            for counters in self._recording:
                counters.slot(+1)
        receives = [(receive, buffer) for receive in hop.receives]
        sends = [(send, slots[slot]) for send, slot in sent]
        return self._transport.post(MessageBatch(sends, receives, "keys", hop.index))

    def _allocated(self, num_tokens: int) -> Buffer:
        """Return a buffer of so many tokens; its contents are undefined."""
        spare, self._spare = self._spare, ()
        if spare and spare[0].shape[0] == num_tokens:
            return spare
        return [x.new_empty((num_tokens, *x.shape[1:])) for x in self._slots[0]]
