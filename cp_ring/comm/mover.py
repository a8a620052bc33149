"""Sends token ranges of tensors to the ranks in a table (`cp_ring.plan.moves`), and
back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_ring.comm.flight import Landing
from cp_ring.comm.transport import Buffer, MessageBatch, Transport
from cp_ring.observe.spans import named, wait_for
from cp_ring.ops.dtypes import sum_dtype
from cp_ring.plan.moves import Moves, Ranges
from cp_ring.plan.records import Transfer

MAX_RANGES = 4
"""Up to this many ranges from one rank to another are messages of their own, which arrive in place.
More ranges are copied into one message.
"""


class Mover:
    """One rank's part of the moves over a transport. Tensors are [tokens, ...]."""

    def __init__(self, moves: Moves, transport: Transport):
        self._transport, self._direct = transport, moves.most_ranges <= MAX_RANGES
        self._ranks, self.rank = range(moves.ranks), transport.rank
        self._leaving, self._coming = (
            [ranges.get(rank, ()) for rank in self._ranks]
            for ranges in (moves.sends(transport.rank), moves.receives(transport.rank))
        )

    def there(self, parts: Sequence[Buffer], kind: str) -> Landing:
        """Send the tokens of `parts[p]` that go to rank p. The landing returns tensors like those
        of `parts[rank]` with all tokens that come here.
        """
        mine, coming = parts[self.rank], self._coming
        if not self._direct:
            land = self._apart(parts, self._leaving, coming, kind)
            places = sorted(
                (start, peer, place)
                for peer, ranges in enumerate(coming)
                for (start, _), place in zip(ranges, _packed(ranges), strict=True)
            )

            def landed() -> list[Tensor]:
                came = land()
                return [
                    torch.cat([x[:0], *(came[peer][i][a:b] for _, peer, (a, b) in places)])
                    for i, x in enumerate(mine)
                ]

            return landed
        size = sum(map(_size, coming))
        whole = [x.new_empty((size, *x.shape[1:])) for x in mine]
        for (first, last), (start, end) in zip(
            self._leaving[self.rank], coming[self.rank], strict=True
        ):
            for x, target in zip(mine, whole, strict=True):
                target[start:end].copy_(x[first:last])
        receives = [(Transfer(peer, coming[peer]), whole) for peer in self._ranks]
        return self._post(parts, self._leaving, receives, whole, kind)

    def moved(self, x: Tensor, kind: str) -> Landing:
        """Run `there` with one tensor, the same for all ranks."""
        return self.there([[x]] * len(self._ranks), kind)

    def back(self, parts: Sequence[Buffer], kind: str) -> Landing:
        """Return tokens to the ranks from which they came: the tensors of `parts[p]` have them in
        the places of the tokens that rank p sent. The landing returns tensors for each rank: the
        tokens that went there, end to end.
        """
        return self._apart(parts, self._coming, self._leaving, kind)

    def summed_back(self, gradient: Tensor, tokens: int, kind: str) -> Landing:
        """Run `back` with the gradient of a tensor of `tokens` tokens that every rank got. The
        landing returns the sum of the ranks' gradients, in float32.
        """
        land = self.back([[gradient]] * len(self._ranks), kind)

        def landed() -> list[Tensor]:
            size = tokens, *gradient.shape[1:]
            total = gradient.new_zeros(size, dtype=sum_dtype(gradient.dtype))
            for ranges, (came,) in zip(self._leaving, land(), strict=True):
                for (start, end), (first, last) in zip(ranges, _packed(ranges), strict=True):
                    total[start:end] += came[first:last]
            return [total]

        return landed

    def _apart(
        self, parts: Sequence[Buffer], leaving: list[Ranges], coming: list[Ranges], kind: str
    ) -> Landing:
        """Send the token ranges `leaving[r]` of `parts[r]` to each rank r, and receive `coming[r]`
        from it. Land as a list with the tensors from each rank, not joined. `kind` names the
        messages in waits and errors.
        """
        came, receives = [], []
        for peer, ranges in enumerate(coming):
            tensors = [
                _joined(x, leaving[peer])
                if peer == self.rank
                else x.new_empty((_size(ranges), *x.shape[1:]))
                for x in parts[self.rank]
            ]
            came.append(tensors)
            places = _packed(ranges) if self._direct else ((0, _size(ranges)),)
            receives.append((Transfer(peer, places), tensors))
        return self._post(parts, leaving, receives, came, kind)

    def _post(
        self,
        parts: Sequence[Buffer],
        leaving: list[Ranges],
        receives: list[tuple[Transfer, list[Tensor]]],
        came: list[Tensor] | list[list[Tensor]],
        kind: str,
    ) -> Landing:
        sends: list[tuple[Transfer, Buffer]] = []
        for peer, ranges in enumerate(leaving):
            tensors: Buffer = parts[peer]
            if peer != self.rank and not (self._direct and all(x.is_contiguous() for x in tensors)):
                tensors = [_joined(x, ranges).contiguous() for x in tensors]
                ranges = _packed(ranges) if self._direct else ((0, _size(ranges)),)
            sends.append((Transfer(peer, ranges), tensors))
        leave, come = (
            [(t, x) for t, x in each if t.peer != self.rank and t.tokens and x[0].numel()]
            for each in (sends, receives)
        )
        pending = self._transport.post(MessageBatch(leave, come, kind))

        def landed() -> Sequence[object]:
            with named(f"wait for {kind}"):
                wait_for(pending)
            return came

        return landed


def _size(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def _packed(ranges: Ranges) -> Ranges:
    """Return the same ranges end to end."""
    return Transfer(0, ranges).packed().ranges


def _joined(x: Tensor, ranges: Ranges) -> Tensor:
    """Return the tokens of the ranges end to end."""
    parts = [x[start:end] for start, end in ranges] or [x[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
