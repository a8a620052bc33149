"""Calls of library functions whose parameters differ from version to version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cp_ring.errors import KernelError


def bind(
    kernel: str, function: Callable[..., Any], values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The keyword arguments of `values` that `function` has parameters for.

    A parameter without a default that is missing in `values` is taken from `defaults`. Raises `KernelError` where it is
    missing there too: the installed version demands something that the adapter of `kernel` does not know.
    """
    parameters = inspect.signature(function).parameters
    bound = {name: values[name] for name in parameters if name in values}
    demanded = [name for name, p in parameters.items() if p.default is p.empty and name not in bound]
    unknown = [name for name in demanded if name not in (defaults or {})]
    if unknown:
        name = getattr(function, "__name__", str(function))
        raise KernelError(f"kernel={kernel!r}: {name} of the installed version wants {', '.join(unknown)}, unknown here")
    return bound | {name: (defaults or {})[name] for name in demanded}
