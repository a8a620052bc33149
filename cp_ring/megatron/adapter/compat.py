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


def group_of(collection: Any, name: str) -> Any:
    """Return the process group `name` (tp, cp, ...) of a Megatron pg_collection, or Megatron's
    global group if `collection` is None.
    """
    if collection is None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=[name])
    return getattr(collection, name)
