"""Deals out the batch rows of each step so that its microbatches have equal work:
--cp-ring-balance-microbatches.
"""

from __future__ import annotations

from typing import Any

from cp_ring.patches.patch import Patch


def _balanced(build: Any, *args: Any) -> Any:
    from megatron.training import get_args

    from cp_ring.megatron.data.balanced_sampler import balanced_loader

    return balanced_loader(build, get_args, *args)


PATCH = Patch(
    what="puts the batch rows of each step in an order in which all microbatches have equal work",
    why="Megatron's samplers deal out batch rows in the order of the data set, and its data "
    "loaders take no other sampler",
    needed=lambda args, options: options.enabled and options.balance_microbatches,
    wraps={
        "megatron.training.training.build_pretraining_data_loader": _balanced,
    },
)
