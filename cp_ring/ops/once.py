"""Backward functions that can be differentiated once, as those that send messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cp_ring.errors import ConfigError
from cp_ring.ops.graphs import out_of_graphs


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward function reject `create_graph`. Torch's decorator of this name lets terms of
    a loss that need a second derivative vanish: a penalty on the gradient of q, say.
    """

    @out_of_graphs
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: attention and shards have no second derivative; take first "
                "gradients without it, and leave penalties on gradients out of the loss"
            )
        return backward(ctx, *gradients)

    return once
