"""Deals out the batch rows of each step so that its microbatches have equal work:
--cp-ring-balance-microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from cp_ring.patches.patch import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from megatron.training import get_args, training

    from cp_ring.megatron.data.balanced_sampler import balanced_loader

    build = training.build_pretraining_data_loader
    yield (
        training,
        "build_pretraining_data_loader",
        functools.partial(balanced_loader, build, get_args),
    )


PATCH = Patch(
    what="puts the batch rows of each step in an order in which all microbatches have equal work",
    why="Megatron's samplers deal out batch rows in the order of the data set, and its data "
    "loaders take no other sampler",
    needed=lambda args, options: options.enabled and options.balance_microbatches,
    replacements=_replacements,
)
