"""Hides the differences between the versions of Megatron-core that layers meet."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def known_arguments(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the `values` whose names are parameters of this version's `function` or class."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in known}


def arguments() -> Any:
    """Return Megatron's global arguments as they are now; None in a program that has parsed
    none.
    """
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def training_step() -> int:
    """Return the current step of Megatron's training loop, counted from 1; 0 outside of the
    loop.
    """
    return int(getattr(arguments(), "curr_iteration", -1)) + 1


def has_window(config: Any, layer_number: int) -> bool:
    """Return True if layer `layer_number` (counted from 1) has the window `config.window_size`, by
    Megatron's own rule.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    return bool(
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    )


def mark_tensor_parallel(parameter: Any, dim: int) -> None:
    """Tell Megatron that tensor-parallel ranks hold different parts of `parameter`, split along
    `dim`.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def sharded_tensors(
    state: dict[str, Any],
    prefix: str,
    split: dict[str, int],
    offsets: tuple[Any, ...],
    tp_group: Any,
    metadata: Any,
) -> dict[str, Any]:
    """Return the sharded state of `state`, whose tensors are split over `tp_group` along the
    dimensions in `split`.
    """
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint as make

    group = (metadata or {}).get("dp_cp_group")
    if group is None:
        return make(state, prefix, split, offsets)  # uses Megatron's global groups
    return make(state, prefix, split, offsets, tp_group=tp_group, dp_cp_group=group)


def group_of(collection: Any, name: str) -> Any:
    """Return the process group `name` (tp, cp, ...) of a Megatron pg_collection, or Megatron's
    global group if `collection` is None.
    """
    if collection is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=[name])
    return getattr(collection, name)
