"""Messages of recurrent layers, which travel while something is computed, and their gradients: the
halo of a convolution, and the gather of the maps of segments.

Shapes: h heads; k and v, channels of keys and of values. A map is [B, A], [h, k, v + k].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_ring.comm.flight import Flight, Landing
from cp_ring.comm.transport import Transport, post_exchange
from cp_ring.recurrent.segments import Gather, Segments, Swap


class Trip:
    """A swap with its places on the device."""

    def __init__(self, swap: Swap, transport: Transport, device: torch.device):
        self.source, self.target = (
            torch.from_numpy(x).to(device) for x in (swap.source, swap.target)
        )
        self.leaving, self.arriving = swap.leaving.tolist(), swap.arriving.tolist()
        self._transport = transport

    def __bool__(self) -> bool:
        return any(self.leaving) or any(self.arriving)

    def post(self, x: Tensor, kind: str, back: bool = False) -> Callable[[], Tensor]:
        """Starts to send x, in the order of the ranks that get it. What this returns waits, and
        gives what arrived, in the order of the ranks that sent it.
        """
        leaving, arriving = self.leaving, self.arriving
        if back:
            leaving, arriving = arriving, leaving
        arrived = x.new_empty(sum(arriving), *x.shape[1:])
        parts, places = x.split(leaving), arrived.split(arriving)
        rank = self._transport.rank
        places[rank].copy_(parts[rank])
        pending = post_exchange(self._transport, parts, places, kind)

        def landed() -> Tensor:
            pending.wait()
            return arrived

        return landed


def halo_flight(trip: Trip) -> Flight:
    """Of the tokens of x [T, d] that other ranks need."""
    held: list[int] = []

    def post(x: Tensor) -> Landing:
        held[:] = x.shape
        land = trip.post(x.index_select(0, trip.source), "halo")
        return lambda: [_placed(land(), trip.target)]

    def post_back(gradient: Tensor) -> Landing:
        land = trip.post(gradient.index_select(0, trip.target), "halo", back=True)

        def landed() -> list[Tensor]:
            come = land()
            total, places = come.new_zeros(held), trip.source
            # a token may be in several halos; the order of the sum does not change from run to run
            if total.is_cuda:  # sorted there, where `index_add_` is not
                return [total.index_put_((places,), come, accumulate=True)]
            return [total.index_add_(0, places, come)]

        return landed

    return Flight(post, post_back)


def _placed(come: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(come).index_copy_(0, places, come)


class StateLinks:
    """The gathers of one rank; makes its tensors once."""

    def __init__(self, segments: Segments, transport: Transport, device: torch.device):
        self._transport, self._device = transport, device
        self.held = held = segments.held(transport.rank)
        self.goes_on, self.hands_on = map(self.tensor, (held.goes_on, held.hands_on))
        _, into, out = np.intersect1d(held.goes_on, held.hands_on, return_indices=True)
        # of the segments that are in both: places in goes_on, and in hands_on
        self.both = self.tensor(into), self.tensor(out)
        self.forward, self.backward = (
            _Walk(segments.gather(transport.rank, back), self) for back in (False, True)
        )

    def __bool__(self) -> bool:
        """Whether any state passes here."""
        return bool(len(self.goes_on) or len(self.hands_on))

    def tensor(self, x: Any) -> Tensor:
        """An array on the device."""
        return torch.from_numpy(x).to(self._device)

    def trip(self, swap: Swap) -> Trip:
        return Trip(swap, self._transport, self._device)


class _Walk:
    """A gather, and how the maps that it brings are composed."""

    def __init__(self, plan: Gather, links: StateLinks):
        self.trip, self._ends = links.trip(plan.swap), links.tensor(plan.ends)
        self._steps = [
            (links.tensor(entries), links.tensor(before)) for entries, before in plan.walk
        ]

    def composed(self, come: Tensor, v: int) -> Tensor:
        """What the composed maps make of the state 0, [segments, h, k, v]."""
        table = _placed(come, self.trip.target)
        total = table[..., :v].clone()
        for entries, before in self._steps:
            total[entries] += table[entries, ..., v:] @ total[before]
        return total[self._ends]


def state_flight(links: StateLinks, v: int) -> Flight:
    """Maps of segments go, [segments that hand on, h, k, v + k], and the states before segments
    come, [segments that go on, h, k, v].

    With the maps may depart a tensor that has a gradient wherever one of another rank has one.
    """
    kept: list[Tensor] = []  # maps and states
    (into, out), forward, backward = links.both, links.forward, links.backward

    def post(maps: Tensor, *like: Tensor) -> Landing:
        maps = maps.detach()
        land = forward.trip.post(maps[forward.trip.source], "states")

        def landed() -> list[Tensor]:
            states = forward.composed(land(), v)
            kept[:] = maps, states.detach()
            return [states]

        return landed

    def post_back(gradient: Tensor) -> Landing:
        """The gradients of the states before segments, and A where these hand on."""
        maps, states = kept
        payload = maps.new_zeros(len(gradient), *maps.shape[1:])
        payload[..., :v] = gradient
        payload[into, ..., v:] = maps[out, ..., v:].mT
        land = backward.trip.post(payload[backward.trip.source], "states")

        def landed() -> list[Tensor]:
            """Gradients of the maps, of which that of A follows from that of B."""
            owed, gradients = backward.composed(land(), v), torch.zeros_like(maps)
            gradients[..., :v] = owed
            gradients[out, ..., v:] = owed[out] @ states[into].mT
            return [gradients]

        return landed

    return Flight(post, post_back)
