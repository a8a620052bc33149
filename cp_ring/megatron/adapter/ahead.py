"""Lets workers of a data loader make what layers need of a microbatch, its layout and its proven
plans, so that training does not wait for them.

A worker makes them after it has collated the samples, and sends them with the batch. They wait
where the batch arrives until the first layer takes them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch.distributed

from cp_ring.plan.plan import PlanSpec
from cp_ring.runtime import RUNTIME

MOST = 64  # results that wait here: more than there are microbatches between workers and layers
Results = dict[Hashable, Any]
"""The documents of microbatches, with their plans, by what they are made of."""


@dataclass(frozen=True)
class LayerPlan:
    """What the plans of one kind of layer depend on, beside the microbatch."""

    cp: int
    rank: int
    window: tuple[int, int]
    causal: bool
    spec: PlanSpec


LAYERS: set[LayerPlan] = RUNTIME.keep(set())
"""The kinds of the layers of the model, which workers know if it is built before they start."""

_arrived: Results = RUNTIME.keep({})
_shared: set[Hashable] = RUNTIME.keep(set())


class PlannedBatch(dict[str, Any]):
    """A batch with the results of a worker, which arrives in another process without them: as a
    dict, while they wait for `take`.
    """

    made: Results

    def __reduce__(self) -> Any:
        return _arrive, (dict(self), self.made)


def _arrive(batch: dict[str, Any], made: Results) -> dict[str, Any]:
    receive(made)
    return batch


def take(key: Hashable) -> Any:
    """Return what another process has made of `key`, once; None if it has made nothing."""
    return _arrived.pop(key, None)


def receive(made: Results) -> None:
    """Keep results of another process until they are taken."""
    _arrived.update(made)
    while len(_arrived) > MOST:
        del _arrived[next(iter(_arrived))]


def share(group: Any) -> None:
    """Send what has arrived at the first rank of a tensor-parallel group, which loads the data, to
    its other ranks. Each of them calls this once a microbatch.
    """
    if group.size() == 1:
        return
    held = [{key: made for key, made in _arrived.items() if key not in _shared}]
    torch.distributed.broadcast_object_list(held, group=group, group_src=0)
    _shared.intersection_update(_arrived)
    _shared.update(held[0])
    if group.rank():
        receive(held[0])
