"""Runs recurrent layers on one rank's tokens in any layout: states and the tokens that convolutions
need come from other ranks (`cp_ring.recurrent.pieces`).

Pieces that hand on their state go first, so that their maps travel while the documents that lie on
one rank are scanned. Pieces that go on with a state of another piece come last. What goes on and
hands on is scanned twice: for its map, and from its state. Autograd gives backward the adjoint
maps, which travel in the opposite order of rounds.

Shapes: T tokens of this rank, of all batch rows; h heads; k and v channels of keys and of values. A
map is [B, A], [h, k, v + k].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_ring.comm.flight import Flight
from cp_ring.comm.mover import Mover
from cp_ring.comm.transport import Transport
from cp_ring.plan.moves import places
from cp_ring.plan.ranges import Ints, expand
from cp_ring.recurrent.pieces import Pieces
from cp_ring.recurrent.scans import Recurrence


class StatePassing:
    """What recurrent layers of one rank do with its tokens; makes its tensors once.

    pieces: of the whole stream. The transport may be `ALONE`, for pieces on one rank.
    numbers: the piece of each token, int32 [T], if no rank needs a state of another piece.
    """

    @torch.inference_mode(False)  # backward of a later call saves these tensors
    def __init__(self, pieces: Pieces, transport: Transport, device: torch.device):
        self._pieces, self._transport, self._device = pieces, transport, device
        self._held = held = np.flatnonzero(pieces.owner == transport.rank)
        self._first = places(pieces.layout, pieces.start[held])[1]
        self._size = (pieces.end - pieces.start)[held]
        numbers = self._tensor(np.repeat(np.arange(len(held)), self._size))
        self.numbers = None if pieces.rounds else numbers.int()
        goes, hands = (np.isin(held, x) for x in (pieces.goes_on, pieces.hands_on))
        self._begins, self._through, self._alone, self._later = map(
            self._group, (~goes & hands, goes & hands, ~goes & ~hands, goes)
        )
        groups = self._begins, self._alone, self._later
        tokens = torch.cat([group.tokens for group in groups])
        self._order = None if len(held) < 2 else tokens.argsort()
        # maps of pieces that begin anew, then of others, in ascending order
        self._maps = self._tensor(goes[hands].argsort(kind="stable").argsort())
        self._halos: dict[int, _Halo] = {}
        self._rounds: list[tuple[Any, Any, Mover]] = []
        for each in pieces.rounds:
            own = pieces.owner[each.piece] == transport.rank
            entries = self._tensor(np.searchsorted(held[goes], each.piece[own]))
            taken = self._tensor(each.place[own])
            self._rounds.append((entries, taken, Mover(each.moves, transport)))

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _group(self, of: np.ndarray) -> Group:
        size = self._size[of]
        return Group(self._tensor(expand(self._first[of], size)[1]), size)

    def scan(self, recurrence: Recurrence, tensors: dict[str, Tensor]) -> Tensor:
        """Return the outputs [T, h, v] of a recurrence, from its tensors [T, ...] by name."""
        outs = []
        maps = []
        if self._begins.count:
            out, states = recurrence.scan(self._begins.take(tensors), self._begins.size, None, True)
            outs.append(out)
            maps.append(F.pad(states, (0, states.shape[2])))
        if self._through.count:
            maps.append(recurrence.maps(self._through.take(tensors), self._through.size))
        if self._rounds:
            if not maps:  # this rank has gradients of those that it gets
                one = {name: x[:1] for name, x in tensors.items()}
                maps.append(recurrence.maps(one, np.ones(1, np.int64))[:0])
            own = torch.cat(maps).index_select(0, self._maps)
            flight, link = _departed(self._rounds[0][2], own, "states")
        if self._alone.count:
            out, _ = recurrence.scan(self._alone.take(tensors), self._alone.size, None, False)
            outs.append(out)
        if self._rounds:
            states = self._entries(flight, link)
            if self._later.count:
                tensors = self._later.take(tensors)
                outs.append(recurrence.scan(tensors, self._later.size, states, False)[0])
            else:  # the gradients of its maps come from other ranks
                outs.append(states.to(outs[0].dtype).reshape(0, *outs[0].shape[1:]))
        whole = torch.cat(outs)
        return whole if self._order is None else whole.index_select(0, self._order)

    def _entries(self, flight: Flight, link: Tensor) -> Tensor:
        """Return the states [pieces that go on, h, k, v] before pieces; round 0 has departed."""
        _, taken, _ = self._rounds[0]
        entries = flight.arrive(link)[0].index_select(0, taken)
        v = entries.shape[3] - entries.shape[2]
        for place, taken, mover in self._rounds[1:]:
            flight, link = _departed(mover, entries, "states")
            earlier = flight.arrive(link)[0].index_select(0, taken)
            b, a = entries.index_select(0, place).split((v, entries.shape[2]), -1)
            composed = F.pad(b, (0, b.shape[2])) + a @ earlier
            entries = entries.index_copy(0, place, composed)
        return entries[..., :v]

    def convolve(
        self,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the causal convolution [T, d] of x [T, d] with weight [d, w] and bias [d], inside
        of documents.

        `function` does it, with the activation, for x [1, T, d] as one sequence. Outputs of the
        first w - 1 tokens of each piece are computed here.
        """
        width = weight.shape[1]
        if width not in self._halos:
            self._halos[width] = _Halo(self, width)
        halo = self._halos[width]
        flight, link = _departed(halo.mover, x.index_select(0, halo.leaving), "halo")
        out = function(x[None])[0]
        wide = torch.cat([x, flight.arrive(link)[0], torch.zeros_like(x[:1])])
        blocks = wide[halo.blocks].unfold(1, width, 1)  # [pieces, w - 1, d, w]
        heads = (blocks.to(weight.dtype) * weight).sum(-1)
        heads = activation(heads if bias is None else heads + bias).flatten(0, 1)
        heads = heads.index_select(0, halo.rows).to(out.dtype)
        return out.index_copy(0, halo.heads, heads)


class Group:
    """Pieces of a rank that are scanned in one call.

    tokens: their places in the shard, int64 [tokens].
    size: the number of tokens of each.
    """

    def __init__(self, tokens: Tensor, size: Ints):
        self.tokens, self.size, self.count = tokens, size, len(size)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tokens of the pieces, end to end."""
        return {name: x.index_select(0, self.tokens) for name, x in tensors.items()}


class _Halo:
    """What a convolution over `width` tokens needs.

    leaving: the places in the shard of the tokens that other ranks need.
    blocks: for each piece its halo and its first tokens, [pieces, 2 * width - 2]: places in shard,
    arrived tokens and one zero.
    rows: of the outputs [pieces * (width - 1)] those of tokens.
    heads: their places in the shard.
    """

    @torch.inference_mode(False)
    def __init__(self, passing: StatePassing, width: int):
        halo = passing._pieces.halo(width)
        moves = halo.moves
        rank = passing._transport.rank
        come = int(moves.tokens[(moves.receiver == rank) & (moves.sender != rank)].sum())
        zero = int(passing._size.sum()) + come
        near = halo.place[passing._held][:, ::-1]
        step = np.arange(width - 1)
        own = passing._first[:, None] + step
        real = step < passing._size[:, None]
        blocks = np.concatenate([near, np.where(real, own, -1)], 1)
        self.mover = Mover(moves, passing._transport)
        holder, leaving = places(passing._pieces.layout, halo.leaving)
        self.leaving = passing._tensor(leaving[holder == rank])
        self.blocks = passing._tensor(np.where(blocks < 0, zero, blocks))
        self.rows, self.heads = map(passing._tensor, (np.flatnonzero(real), own[real]))


def _departed(mover: Mover, entries: Tensor, kind: str) -> tuple[Flight, Tensor]:
    """Start to send entries to the ranks that need them; `arrive` of the flight takes the link."""

    count = len(entries)

    def post_back(gradient: Tensor) -> Any:
        land = mover.summed_back(gradient, count, f"{kind} gradients")
        return lambda: [total.to(gradient.dtype) for total in land()]

    flight = Flight(lambda x: mover.moved(x, kind), post_back)
    return flight, flight.depart(entries)
