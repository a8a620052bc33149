"""Lets the distributed optimizer load checkpoints with torch's own Adam (neither TransformerEngine
nor Apex installed).

torch's Adam keeps a `step` tensor for every parameter. Megatron's distributed optimizer does not
expect this in three places:

- It reads the step of an optimizer that has no state yet, which is every optimizer that is about to
  load a checkpoint.
- It takes the step from tensors that lack it or have an old one, because checkpoints keep the step
  elsewhere.
- It gives one shared step tensor to all parameters; Adam then adds 1 for every parameter in each
  training step.

With TransformerEngine or Apex these three are not changed. In all cases, Megatron's optimizer
copies values into float32 parameters while gradients are enabled, which torch rejects for leaves of
the graph; this patch disables gradients for the copy.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_ring.megatron.wrapping import Function
from cp_ring.patches.patch import Patch


def _is_torch_adam(self: Any) -> bool:
    import megatron.core.optimizer.distrib_optimizer as module

    return not module.HAVE_APEX_OR_TE and isinstance(
        self.optimizer, torch.optim.Adam | torch.optim.AdamW
    )


def _fill(self: Any) -> None:
    """Give every parameter without a state the state that torch's Adam itself starts from."""
    for group in self.optimizer.param_groups if _is_torch_adam(self) else ():
        for param in group["params"]:
            if not self.optimizer.state[param]:
                zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[param] = {"step": torch.tensor(0.0), **zeros}


def _state_dict_of_any(state_dict: Function, self: Any) -> Any:
    _fill(self)
    return state_dict(self)


def _load_with_own_steps(load_state_dict: Function, self: Any, state: dict[str, Any]) -> None:
    _fill(self)
    load_state_dict(self, state)
    if _is_torch_adam(self):
        for values in self.optimizer.state.values():
            values["step"] = values["step"].clone()


def _set_states_with_step(
    set_states: Function, self: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    if _is_torch_adam(self):
        # The parameter groups have set the step; a step among `tensors` would be the one before
        # loading.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        tensors = {**tensors, "step": state["step"].clone()}
    with torch.no_grad():
        set_states(self, model_param, tensors)


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

PATCH = Patch(
    what="lets the distributed optimizer load checkpoints into torch's Adam, with a step counter "
    "of its own for every parameter",
    why="without TransformerEngine and Apex, loading fails on Adam's `step`, or counts steps "
    "wrongly afterwards",
    needed=lambda args, options: True,
    wraps={
        f"{_OPTIMIZER}.state_dict": _state_dict_of_any,
        f"{_OPTIMIZER}.load_state_dict": _load_with_own_steps,
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states": _set_states_with_step,
    },
)
