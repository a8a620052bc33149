"""Makes --use-torch-fsdp2 exact where --calculate-per-token-loss is given, and its checkpoints
resume as they were.

Five things are wrong in Megatron 0.16 to 0.20:

- With --calculate-per-token-loss gradients are divided by the number of tokens of all ranks, by
  `scale_gradients` of the wrapper around the model. That of FSDP2 does nothing, and FSDP2 averages
  over ranks where Megatron's own wrapper adds. So gradients were larger by the tokens of a rank.
  Adam hides it; clipping and the logged norm do not.
- Checkpoints match the optimizer's parameters with the model's by the identity of the local tensor
  of a DTensor. torch 2.13 makes a new object whenever it is asked for that of a parameter, so that
  a save failed.
- Until 0.18 the wrapper does not know an argument that the training loop gives when a step ends.
- Tensors are loaded in place, and the rest of the optimizer's state is not loaded: Adam's step,
  without which torch's Adam fails and others begin anew, and the settings of parameter groups.
- FSDP2 gives modules other parameters than they were built with. A Mamba layer hands convolution,
  dt_bias, A_log and D to its helper for context parallelism, at any size of it. That goes on
  reading the first ones, which no optimizer trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cp_ring.megatron.compat import has_training_loop
from cp_ring.megatron.wrapping import Function, around
from cp_ring.patches.patch import Patch, Replacement


def _scale(self: Any, factor: Any) -> None:
    """Multiplies all gradients by `factor`, after making sums over data- and context-parallel ranks
    of FSDP2's averages.
    """
    factor = factor * self.process_group.size()
    for param in self.module.parameters():
        if param.grad is not None:
            local_tensor(param.grad).mul_(factor)


def _finish_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
    """Does nothing: FSDP2 reduces gradients in backward."""


def local_tensor(tensor: Any) -> Any:
    """The local tensor of a DTensor, the same object each time; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


@around
def _with_optimizer(load_checkpoint: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `load_checkpoint`, which calls `load_state_dict` of model (which does nothing) and
    optimizer in any case.
    """
    kwargs.pop("skip_load_to_model_and_opt", None)
    return load_checkpoint(*args, **kwargs)


@around
def _rest_of_state(load_state_dict: Function, self: Any, state: dict[str, Any]) -> None:
    """An optimizer's `load_state_dict`, which for sharded parameters loads what was not loaded in
    place.
    """
    optimizer = self.optimizer
    if not any(
        hasattr(param, "_local_tensor")
        for group in optimizer.param_groups
        for param in group["params"]
    ):
        load_state_dict(self, state)
        return
    saved = state.get("optimizer", state.get("optimizer_state_dict", state))
    step = saved["state"].get("common_step")
    groups = self._filter_and_reorder_param_groups(optimizer.param_groups, saved["param_groups"])
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
        for param in group["params"] if step is not None else ():
            optimizer.state[param]["step"] = step.clone()


@around
def _with_own_weights(forward: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a Mamba layer, whose helper for context parallelism then reads the
    parameters that the layer has now.
    """
    for name in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"):
        if hasattr(self.cp, f"{name}_cp1"):  # of older versions the convolution is one module
            setattr(self.cp, f"{name}_cp1", getattr(self, name))
    return forward(self, *args, **kwargs)


def _replacements() -> Iterator[Replacement]:
    from megatron.core.dist_checkpointing import optimizer as sharding
    from megatron.core.distributed.torch_fully_sharded_data_parallel import (
        TorchFullyShardedDataParallel,
    )
    from megatron.core.optimizer import optimizer
    from megatron.core.ssm.mamba_mixer import MambaMixer

    yield TorchFullyShardedDataParallel, "scale_gradients", _scale
    yield TorchFullyShardedDataParallel, "finish_grad_sync", _finish_grad_sync
    yield sharding, "to_local_if_dtensor", local_tensor
    for owner in (optimizer.FP32Optimizer, optimizer.Float16OptimizerWithFloat16Params):
        yield owner, "load_state_dict", _rest_of_state(owner.load_state_dict)
    yield MambaMixer, "forward", _with_own_weights(MambaMixer.forward)
    if has_training_loop():
        import megatron.training.training as training

        yield training, "load_checkpoint", _with_optimizer(training.load_checkpoint)


PATCH = Patch(
    what="divides gradients of --use-torch-fsdp2 by the number of tokens of all ranks; saves and "
    "loads all of its optimizer; trains all weights of Mamba layers",
    why="Megatron's wrapper around FSDP2 does not divide; saving fails with torch 2.13, and "
    "Adam's step is not loaded; Mamba layers hold the parameters from before",
    when="--cp-ring --use-torch-fsdp2",
    replacements=_replacements,
)
