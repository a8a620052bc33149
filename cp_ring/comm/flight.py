"""Messages that are posted now and land later. In backward their gradients travel the other way.

One function of autograd posts a message, and another one waits for it. In backward the second one
runs first: it posts the gradients, for which the first one waits. Autograd runs nodes in the
opposite order of their making, on every rank, so what overlaps in forward does so in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_ring.ops.dtypes import waited
from cp_ring.ops.once import once_differentiable

Landing = Callable[[], Sequence[Any]]
"""A function that waits for messages and returns the tensors that arrived."""


class Flight:
    """One message of tensors.

    post: starts to send tensors, and returns a `Landing` for those that arrive.
    post_back: does the same with the gradients of the arrived tensors; its `Landing` returns the
    gradients of the sent tensors.
    """

    def __init__(self, post: Callable[..., Landing], post_back: Callable[..., Landing]):
        self.post, self.post_back = post, post_back
        self._landing: Landing | None = None

    def depart(self, *tensors: Tensor) -> Tensor:
        """Post the message. The result is for `arrive`."""
        return _Depart.apply(self, *tensors)

    def arrive(self, link: Tensor) -> tuple[Tensor, ...]:
        """Wait for the message."""
        return _Arrive.apply(self, link)

    def begin(self, landing: Landing) -> None:
        self._landing = landing

    def land(self) -> tuple[Any, ...]:
        landing, self._landing = self._landing, None
        assert landing is not None, "a message is awaited that was not posted"
        return tuple(landing())


class _Depart(torch.autograd.Function):
    """Posts the message; in backward it waits for the gradients. Its result only links it to
    `_Arrive`.
    """

    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        ctx.flight = flight
        tensors = tuple(map(waited, tensors))
        flight.begin(flight.post(*tensors))
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.flight.land()


class _Arrive(torch.autograd.Function):
    """Waits for the message; in backward it posts the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, link: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        # a checkpoint ends its second run after the last tensor that is saved: not before this
        ctx.save_for_backward(link)
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        gradients = tuple(map(waited, gradients))
        ctx.flight.begin(ctx.flight.post_back(*gradients))
        return None, gradients[0].new_zeros(0)
