"""Messages that are posted now and land later and, in backward, those of the gradients, the other
way.

A function of autograd posts a message, and another one waits for it. In backward the second one
runs first: it posts the gradients, for which the first one waits. Autograd runs nodes in the
opposite order of their making, on every rank, so what overlaps in forward does so in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Landing = Callable[[], Sequence[Any]]
"""Waits for messages, and returns what arrived."""


class Flight:
    """One message of tensors. `post` starts to send them; what it returns waits, and gives the
    tensors that arrived. `post_back` does so with the gradients of these, and gives the gradients
    of those.
    """

    def __init__(self, post: Callable[..., Landing], post_back: Callable[..., Landing]):
        self.post, self.post_back = post, post_back
        self._landing: Landing | None = None

    def depart(self, *tensors: Tensor) -> Tensor:
        """Posts the message. The result is for `arrive`."""
        return _Depart.apply(self, *tensors)

    def arrive(self, link: Tensor) -> tuple[Tensor, ...]:
        """Waits for the message."""
        return _Arrive.apply(self, link)

    def begin(self, landing: Landing) -> None:
        self._landing = landing

    def land(self) -> tuple[Any, ...]:
        landing, self._landing = self._landing, None
        assert landing is not None, "a message is awaited that was not posted"
        return tuple(landing())


class _Depart(torch.autograd.Function):
    """In backward, the gradients land. The result only links it to `_Arrive`."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        ctx.flight = flight
        flight.begin(flight.post(*tensors))
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.flight.land()


class _Arrive(torch.autograd.Function):
    """In backward, the gradients are posted."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, link: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        ctx.flight.begin(ctx.flight.post_back(*gradients))
        return None, gradients[0].new_zeros(0)
