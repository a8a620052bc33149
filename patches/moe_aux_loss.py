"""Corrects the weight of the load-balancing loss of experts under context parallelism, before
Megatron-core 0.19.

With --calculate-per-token-loss all gradients are divided by the number of tokens of all ranks, so
the router multiplies its loss by a number of tokens. The loss covers the tokens of all tensor- and
context-parallel ranks, but the router multiplies by the number of this rank's tokens. So the weight
shrinks as the context-parallel size grows.
"""

from __future__ import annotations

from typing import Any

from cp_ring.megatron.compat import within
from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch


def _with_all_tokens(
    attach: Function,
    self: Any,
    activation: Any,
    *args: Any,
    valid_token_count: Any = None,
    **kwargs: Any,
) -> Any:
    tokens = activation.shape[0] if valid_token_count is None else valid_token_count
    return attach(
        self, activation, *args, valid_token_count=tokens * self.tp_cp_group.size(), **kwargs
    )


def _unneeded() -> str:
    return "megatron-core counts the tokens of all ranks since 0.19" if within(">=0.19") else ""


PATCH = Patch(
    what="weighs the load-balancing loss of experts by the tokens of all tensor- and "
    "context-parallel ranks",
    why="Megatron before 0.19 counts the tokens of one rank, so the weight of this loss shrinks "
    "as the context parallel size grows",
    needed=lambda args, options: options.enabled and args.num_experts,
    wraps={
        "megatron.core.transformer.moe.router."
        "TopKRouter.attach_and_log_load_balancing_loss": _with_all_tokens,
    },
    unneeded=_unneeded,
)
