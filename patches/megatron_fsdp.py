"""Makes --use-megatron-fsdp split learned sinks with tensor parallelism, and its optimizer's state
the same on all ranks.

Three things are wrong in Megatron 0.19 and 0.20:

- The wrapper knows by class names how weights are split over tensor-parallel ranks; that of ring
  attention is a new name.
- A rank with no part of a parameter has no state of the optimizer for it. Megatron's save and load
  gather each tensor of the state by a collective, so that ranks with other parts wait forever, or
  take other tensors for the one that they gather.
- Before it loads, Megatron makes the optimizer's state by a step with zero gradients. Where there
  is nothing to load, as at the first start of a job with --load, this step counts: Adam's bias
  correction and weight decay then begin one step late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cp_ring.megatron.wrapping import Function, around
from cp_ring.patches.fsdp2 import local_tensor
from cp_ring.patches.patch import Patch, Replacement

_SETTINGS = ("lr", "weight_decay")


@around
def _uncounted(make_states: Function, self: Any) -> None:
    """The method that makes the optimizer's state by a step, which then changes no parameter and
    does not count.
    """
    optimizer = self.optimizer
    steps = {
        param: state["step"].clone() for param, state in optimizer.state.items() if "step" in state
    }
    groups = [
        {name: group[name] for name in (*_SETTINGS, "step") if name in group}
        for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group.update({name: 0.0 for name in _SETTINGS if name in group})
    make_states(self)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        if "step" not in values:
            group.pop("step", None)
        group.update(values)
    for param, state in optimizer.state.items():
        if "step" in state:  # torch's; others count in their groups
            state["step"].copy_(steps.get(param, 0))


@around
def _whole(sharded: Function, self: Any, is_loading: bool = False) -> Any:
    """The method that lists the optimizer's state, with empty tensors for parameters of which this
    rank has no part.
    """
    if is_loading and not self.optimizer.state:
        self._init_optimizer_states_with_dummy_values()
    _add_empty(self.optimizer)
    return sharded(self, is_loading)


def _add_empty(optimizer: Any) -> None:
    """Gives each parameter of which this rank has no part the state of the others, empty, with the
    same number of steps.

    Then all states are in the order of the parameters, because each is gathered by a collective.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [param for param in params if local_tensor(param).numel() and optimizer.state.get(param)]
    if not own:
        return
    like = optimizer.state[own[0]]
    sharded = {
        name: value.dtype for name, value in like.items() if local_tensor(value) is not value
    }
    for param in (param for param in params if not local_tensor(param).numel()):
        state = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in sharded.items()}
        optimizer.state[param] = state | ({"step": like["step"].clone()} if "step" in like else {})
    for param in params:
        if param in optimizer.state:
            optimizer.state[param] = optimizer.state.pop(param)


def _replacements() -> Iterator[Replacement]:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # until 0.19 there is one version
    wrapper = vars(adapter).get("FullyShardedDataParallelV1", adapter.FullyShardedDataParallel)
    known = wrapper._MODULE_TYPE_REGISTRY
    known = {**known, "column": {*known["column"], "RingDotProductAttention"}}
    yield wrapper, "_MODULE_TYPE_REGISTRY", known
    for name, wrap in (
        ("_init_optimizer_states_with_dummy_values", _uncounted),
        ("sharded_param_state_fsdp_dtensor", _whole),
    ):
        yield DistributedOptimizer, name, wrap(getattr(DistributedOptimizer, name))


PATCH = Patch(
    what="splits learned sinks of --use-megatron-fsdp, completes its optimizer's state, and makes "
    "that without counting a step",
    versions=">=0.19,<0.21",
    why="Megatron does not know ring attention by name; its save hangs where a rank has no part "
    "of a parameter",
    when="--cp-ring --use-megatron-fsdp",
    replacements=_replacements,
)
