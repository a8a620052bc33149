"""Backward functions that can be differentiated once, as those that send messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of this name, which takes the host time only with `create_graph`."""
    guarded = function.once_differentiable(backward)

    def once(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return once
