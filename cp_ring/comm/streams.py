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
        turns, pending = self._order, list[Pending]()
        for place, turn in enumerate(turns):
            hop, slot = turn.hop, turn.slot
            if place == len(pending):
                pending.append(self._posted(turn))
            wait_for(pending[place])
            pending[place] = DONE  # which frees the tensors of its messages
            # A GPU's kernels are only launched here: those of the rank's own keys, which wait for
            # nothing, go before the first messages. A CPU computes them first, so they go after.
            launched = self._slots[0][0].is_cuda and not slot
            ahead = turns[: 0 if launched else turn.ahead]
            pending += [self._posted(later) for later in ahead[len(pending) :]]
            self._leave()
            self._spare = ()
            for counters in self._recording:
                counters.hops += bool(len(hop.tiles))
            yield hop, *self._slots[slot]
            pending += [self._posted(later) for later in turns[len(pending) : turn.ahead]]
            if slot:
                self._spare = self._slots.pop(slot)
                for counters in self._recording:
                    counters.slot(-1)
        self._leave()

    def _leave(self) -> None:
        """In backward, post the gradients of the last hop, unless they left with keys."""
        if isinstance(self._transport, Joining):
            self._transport.leave()

    def _posted(self, turn: Turn) -> Pending:
        """Post the messages of a hop."""
        hop, slots = turn.hop, self._slots
        if self._transport is None or not (turn.slot or turn.sends):
            return DONE
        buffer: Buffer = ()
        if turn.slot:
            buffer = slots[turn.slot] = self._allocated(hop.num_keys)
            debug.fill(*buffer)
            for counters in self._recording:
                counters.slot(+1)
        receives = [(receive, buffer) for receive in hop.receives]
        sends = [(send, slots[slot]) for send, slot in turn.sends]
        return self._transport.post(MessageBatch(sends, receives, "keys", hop.index))

    def _allocated(self, num_tokens: int) -> Buffer:
        """Return a buffer of so many tokens; its contents are undefined."""
        spare, self._spare = self._spare, ()
        if spare and len(spare[0]) == num_tokens:
            return spare
        return [x.new_empty((num_tokens, *x.shape[1:])) for x in self._slots[0]]
