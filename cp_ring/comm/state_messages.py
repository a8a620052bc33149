"""Messages of recurrent layers, which travel while something is computed, and their gradients: the
halo of a convolution, and states in a chain or a gather.

A function of autograd posts a message, and another one waits for it. In backward, the second one
runs first: it posts the gradients, for which the first one waits.

Shapes: h heads; k and v, channels of keys and of values. A map is [B, A], [h, k, v + k].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_ring.comm.nodes import node_size, ranks_per_node
from cp_ring.comm.transport import Transport, post_exchange
from cp_ring.plan.exchange.chains import Chains, Swap
from cp_ring.plan.sizes.device_rates import HOST_RATES, RATES, Rates


class StateLinks:
    """How states pass one rank of `chains`; makes its tensors once.

    rates: by which chain or gather is chosen; by default those that are assumed of the device.
    """

    def __init__(
        self, chains: Chains, transport: Transport, device: torch.device, rates: Rates | None
    ):
        self._chains, self._transport, self._device = chains, transport, device
        self.plan = chains.steps(transport.rank)
        plan = self.plan
        self.goes_on, self.hands_on = map(self.tensor, (plan.goes_on, plan.hands_on))
        _, into, out = np.intersect1d(plan.goes_on, plan.hands_on, return_indices=True)
        # of those that are in both: places in goes_on and in hands_on, and the states that they get
        self.both = tuple(map(self.tensor, (into, out, plan.gets[into])))
        self.arrivals = int(plan.gets.max(initial=-1)) + 1
        same = np.array_equal(plan.gets, np.arange(self.arrivals))
        self.gets = None if same else self.tensor(plan.gets)
        near = node_size(getattr(transport, "ranks", range(0)), ranks_per_node())
        rates = rates or (RATES if device.type == "cuda" else HOST_RATES)
        self.way = lru_cache(lambda state, whole: chains.way(state, whole, rates, near))
        self.chain, self.gather = lru_cache(self._make_chain), lru_cache(self._make_gather)
        self.doublings = lru_cache(
            lambda back: list(map(self.trip, chains.doublings(transport.rank, back)))
        )

    def __bool__(self) -> bool:
        """Whether any state passes here."""
        return bool(len(self.goes_on) or len(self.hands_on))

    def tensor(self, x: Any) -> Tensor:
        """An array on the device."""
        return torch.from_numpy(x).to(self._device)

    def trip(self, swap: Swap) -> Trip:
        return Trip(swap, self._transport, self._device)

    def _make_chain(self) -> list[tuple[Trip, Tensor, Tensor]]:
        steps = [
            (self.trip(swap), self.tensor(into), self.tensor(out))
            for swap, into, out in self.plan.steps
        ]
        return [step for step in steps if step[0]]

    def _make_gather(self, back: bool) -> tuple[list[Trip], list[tuple[Tensor, Tensor]], Tensor]:
        plan = self._chains.gather(self._transport.rank, back)
        walk = [(self.tensor(entries), self.tensor(before)) for entries, before in plan.walk]
        return list(map(self.trip, plan.swaps)), walk, self.tensor(plan.ends)


class StateMessages:
    """The way of states in one call of a layer: its maps go, and states before segments come.

    state: h, k and v. like: a tensor with a gradient wherever one of another rank has one.
    """

    def __init__(
        self, links: StateLinks, state: tuple[int, int, int], like: Tensor, dtype: torch.dtype
    ):
        heads, k, v = state
        maps = like.new_empty(len(links.hands_on), heads, k, v + k, dtype=dtype)
        entry = heads * k * maps.element_size()
        ways = {"chain": _Chained, "gather": _Gathered, "doublings": _Doubled}
        self._way = ways[links.way(entry * v, entry * (v + k))](links, maps, v)
        self._like = like
        self._sent: list[Tensor] = []

    def send(self, wave: int, entries: Tensor, maps: Tensor) -> None:
        """Takes the maps of segments, whose places in `hands_on` are `entries`. All waves are sent
        in order.
        """
        self._sent.append(_Send.apply(self._way, wave, entries, maps, self._like))

    def states(self) -> Tensor:
        """The state before each segment that goes on, [segments, h, k, v]."""
        return _States.apply(self._way, *self._sent)


class _Chained:
    """States that pass border after border."""

    def __init__(self, links: StateLinks, maps: Tensor, v: int):
        self.maps, self.v, self._links = maps, v, links
        self._steps = links.chain()
        self.grads: Tensor | None = None

    def _empty(self, count: int) -> Tensor:
        return self.maps.new_zeros(count, *self.maps.shape[1:3], self.v)

    def _with_grads_of_a(self, owed: Tensor) -> Tensor:
        """Gradients of the maps, from those of B."""
        grads = torch.zeros_like(self.maps)
        grads[..., : self.v] = owed
        _, gone, gets = self._links.both
        grads[gone, ..., self.v :] = owed[gone] @ self._states[gets].mT
        return grads

    def send(self, wave: int) -> None:
        if wave == 1:  # all maps are known
            self._outs = self.maps[..., : self.v].clone()
            trip = self._steps[0][0]
            self._landed = trip.post(self._outs[trip.source], "states")

    def states(self) -> Tensor:
        states, outs = self._empty(self._links.arrivals), self._outs
        for number, (trip, into, out) in enumerate(self._steps):
            if number:
                self._landed = trip.post(outs[trip.source], "states")
            states[trip.target] = self._landed()
            outs[out] += self.maps[out, ..., self.v :] @ states[into]
        del self._outs
        self._states = states.detach()
        return states if self._links.gets is None else states[self._links.gets]

    def send_back(self, gradient: Tensor) -> None:
        self.grads, self._total = None, gradient.clone()
        if self._links.gets is not None:
            self._total = _added(self._empty(self._links.arrivals), self._links.gets, gradient)
        trip = self._steps[-1][0]
        self._landed = trip.post(self._total[trip.target], "states", back=True)

    def gradients(self) -> Tensor:
        if self.grads is None:
            total, owed = self._total, self._empty(len(self.maps))
            for number, (trip, into, out) in enumerate(reversed(self._steps)):
                if number:
                    _added(total, into, self.maps[out, ..., self.v :].mT @ owed[out])
                    self._landed = trip.post(total[trip.target], "states", back=True)
                _added(owed, trip.source, self._landed())
            del self._total
            self.grads = self._with_grads_of_a(owed)
        return self.grads


class _Gathered(_Chained):
    """Maps that come at once, of all segments that one needs."""

    def __init__(self, links: StateLinks, maps: Tensor, v: int):
        super().__init__(links, maps, v)
        self._sent: list[Callable[[], Tensor]] = []

    def _walked(self, back: bool) -> Tensor:
        trips, walk, ends = self._links.gather(back)
        table = self.maps.new_empty(sum(len(trip.target) for trip in trips), *self.maps.shape[1:])
        for trip, landed in zip(trips, self._sent, strict=True):
            table[trip.target] = landed()
        self._sent = []
        total = table[..., : self.v].clone()
        for entries, before in walk:
            total[entries] += table[entries, ..., self.v :] @ total[before]
        return total[ends]

    def send(self, wave: int) -> None:
        trip = self._links.gather(False)[0][wave]
        self._sent.append(trip.post(self.maps[trip.source], "states"))

    def states(self) -> Tensor:
        states = self._walked(False)
        self._states = states.detach()
        return states

    def _payload(self, gradient: Tensor) -> Tensor:
        """Maps of gradients: those of the states before segments, and A where these hand on."""
        self.grads, (into, out, _) = None, self._links.both
        payload = self.maps.new_zeros(len(gradient), *self.maps.shape[1:])
        payload[..., : self.v] = gradient
        payload[into, ..., self.v :] = self.maps[out, ..., self.v :].mT
        return payload

    def send_back(self, gradient: Tensor) -> None:
        trip, payload = self._links.gather(True)[0][0], self._payload(gradient)
        self._sent = [trip.post(payload[trip.source], "states")]

    def gradients(self) -> Tensor:
        if self.grads is None:
            self.grads = self._with_grads_of_a(self._walked(True))
        return self.grads


class _Doubled(_Gathered):
    """Maps of twice as many segments at each step."""

    def _walked(self, back: bool) -> Tensor:
        (first, *others), landed = self._links.doublings(back), self._sent.pop()()
        table = torch.empty_like(landed).index_copy_(0, first.target, landed)
        for trip in others:
            before = trip.post(table[trip.source], "states")()
            own = table[trip.target]
            whole = own[..., self.v :] @ before
            whole[..., : self.v] += own[..., : self.v]
            table[trip.target] = whole
        return table[..., : self.v].contiguous()

    def send(self, wave: int) -> None:
        if wave == 1:  # all maps are known
            trip = self._links.doublings(False)[0]
            self._sent = [trip.post(self.maps[trip.source], "states")]

    def send_back(self, gradient: Tensor) -> None:
        trip, payload = self._links.doublings(True)[0], self._payload(gradient)
        self._sent = [trip.post(payload[trip.source], "states")]


def _added(total: Tensor, places: Tensor, parts: Tensor) -> Tensor:
    """`total`, to which parts are added in place, in an order that does not change from run to run;
    places may repeat.
    """
    if total.is_cuda:  # sorted there, where `index_add_` is not
        return total.index_put_((places,), parts, accumulate=True)
    return total.index_add_(0, places, parts)


class _Send(torch.autograd.Function):
    """Maps of a wave leave. In backward, gradients of maps are what has come."""

    @staticmethod
    def forward(
        ctx: Any, way: _Chained, wave: int, entries: Tensor, maps: Tensor, like: Tensor
    ) -> Tensor:
        ctx.way, ctx.entries = way, entries
        way.maps[entries] = maps
        way.send(wave)
        return maps.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.way.gradients()[ctx.entries], None


class _States(torch.autograd.Function):
    """States have come. In backward, their gradients leave."""

    @staticmethod
    def forward(ctx: Any, way: _Chained, *links: Tensor) -> Tensor:
        ctx.way, ctx.links = way, len(links)
        return way.states()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way.send_back(gradient)
        return None, *[gradient.new_zeros(0)] * ctx.links


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


class HaloMessages:
    """Tokens of x [T, d] that leave at once; those that come are wanted later."""

    def __init__(self, trip: Trip, x: Tensor):
        self.trip = trip
        self.landed: Callable[[], Tensor] = lambda: x
        self._link = _Leave.apply(x, self)

    def arrived(self) -> Tensor:
        return _Arrive.apply(self._link, self)


class _Leave(torch.autograd.Function):
    """Tokens leave. In backward, their gradients have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: HaloMessages) -> Tensor:
        ctx.halo, ctx.shape = halo, x.shape
        halo.landed = halo.trip.post(x.index_select(0, halo.trip.source), "halo")
        return x.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, link: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.halo.landed()
        return _added(gradient.new_zeros(ctx.shape), ctx.halo.trip.source, gradient), None


class _Arrive(torch.autograd.Function):
    """Tokens have come. In backward, their gradients leave."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, halo: HaloMessages) -> Tensor:
        ctx.halo = halo
        arrived = halo.landed()
        return arrived.new_empty(arrived.shape).index_copy_(0, halo.trip.target, arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip = ctx.halo.trip
        ctx.halo.landed = trip.post(gradient.index_select(0, trip.target), "halo", back=True)
        return gradient.new_zeros(0), None
