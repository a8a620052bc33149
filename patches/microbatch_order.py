"""Deals out the batch rows of each step so that its microbatches have equal work:
--cp-ring-balance-microbatches.
"""

from __future__ import annotations

from cp_ring.patches.patch import Patch

PATCH = Patch(
    what="puts the batch rows of each step in an order in which all microbatches have equal work",
    why="Megatron's samplers deal out batch rows in the order of the data set, and its data "
    "loaders take no other sampler",
    needed=lambda args, options: options.enabled and options.balance_microbatches,
    wraps={
        "megatron.training.datasets.data_samplers."
        "build_pretraining_data_loader": "cp_ring.megatron.data.balanced_sampler.balanced_loader",
    },
)
