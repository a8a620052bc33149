"""Messages of recurrent layers, which travel while something is computed, and their gradients: the
halo of a convolution, and the gather of the maps of segments.

A function of autograd posts a message, and another one waits for it. In backward, the second one
runs first: it posts the gradients, for which the first one waits.

Shapes: h heads; k and v, channels of keys and of values. A map is [B, A], [h, k, v + k].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class Flight(Protocol):
    """A message and, in backward, the one of its gradients the other way."""

    def leave(self, x: Tensor) -> None: ...

    def arrive(self) -> Tensor: ...

    def leave_back(self, gradient: Tensor) -> None: ...

    def arrive_back(self) -> Tensor: ...


def depart(flight: Flight, x: Tensor, like: Tensor | None = None) -> Tensor:
    """Posts the message of x. The result is for `arrived`.

    like: a tensor with a gradient wherever one of another rank has one, where x may have none.
    """
    return _Depart.apply(x, like, flight)


def arrived(flight: Flight, link: Tensor) -> Tensor:
    """Waits for the message."""
    return _Arrive.apply(link, flight)


class _Depart(torch.autograd.Function):
    """In backward, the gradients have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor | None, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.leave(x)
        return x.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None, None]:
        return ctx.flight.arrive_back(), None, None


class _Arrive(torch.autograd.Function):
    """In backward, the gradients leave."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.flight.leave_back(gradient)
        return gradient.new_zeros(0), None


class HaloFlight:
    """Tokens of x [T, d] that other ranks need; follows `Flight`."""

    def __init__(self, trip: Trip):
        self._trip = trip

    def leave(self, x: Tensor) -> None:
        self._shape = x.shape
        self._landed = self._trip.post(x.index_select(0, self._trip.source), "halo")

    def arrive(self) -> Tensor:
        come = self._landed()
        return come.new_empty(come.shape).index_copy_(0, self._trip.target, come)

    def leave_back(self, gradient: Tensor) -> None:
        leaving = gradient.index_select(0, self._trip.target)
        self._landed = self._trip.post(leaving, "halo", back=True)

    def arrive_back(self) -> Tensor:
        come = self._landed()
        total, places = come.new_zeros(self._shape), self._trip.source
        # a token may be in several halos; the order of the sum does not change from run to run
        if total.is_cuda:  # sorted there, where `index_add_` is not
            return total.index_put_((places,), come, accumulate=True)
        return total.index_add_(0, places, come)


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
        table = come.new_empty(come.shape).index_copy_(0, self.trip.target, come)
        total = table[..., :v].clone()
        for entries, before in self._steps:
            total[entries] += table[entries, ..., v:] @ total[before]
        return total[self._ends]


class StateFlight:
    """Maps of segments go, [segments that hand on, h, k, v + k], and the states before segments
    come, [segments that go on, h, k, v]; follows `Flight`.
    """

    def __init__(self, links: StateLinks, v: int):
        self._links, self._v = links, v

    def leave(self, x: Tensor) -> None:
        trip, self._maps = self._links.forward.trip, x.detach()
        self._landed = trip.post(self._maps[trip.source], "states")

    def arrive(self) -> Tensor:
        states = self._links.forward.composed(self._landed(), self._v)
        self._states = states.detach()
        return states

    def leave_back(self, gradient: Tensor) -> None:
        """The gradients of the states before segments, and A where these hand on."""
        (into, out), trip = self._links.both, self._links.backward.trip
        payload = self._maps.new_zeros(len(gradient), *self._maps.shape[1:])
        payload[..., : self._v] = gradient
        payload[into, ..., self._v :] = self._maps[out, ..., self._v :].mT
        self._landed = trip.post(payload[trip.source], "states")

    def arrive_back(self) -> Tensor:
        """Gradients of the maps, of which that of A follows from that of B."""
        owed, (into, out) = self._links.backward.composed(self._landed(), self._v), self._links.both
        gradients = torch.zeros_like(self._maps)
        gradients[..., : self._v] = owed
        gradients[out, ..., self._v :] = owed[out] @ self._states[into].mT
        return gradients
