"""Calls of library functions whose parameters differ between versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cp_ring.errors import KernelError
from cp_ring.runtime import RUNTIME

_NOTHING: Mapping[str, Any] = {}


@RUNTIME.cache(maxsize=256)
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `function`, read once.

    A `torch.library.custom_op` is an object that takes `(*args, **kwargs)`. Its parameters are
    those of the Python function that it was made from.
    """
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def bind(
    kernel: str,
    function: Callable[..., Any],
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] = _NOTHING,
) -> dict[str, Any]:
    """Return the keyword arguments among `values` that `function` has parameters for.

    A parameter without a default that is missing in `values` is taken from `defaults`. Raises
    `KernelError` if it is missing there too: the installed version needs a value that the adapter
    of `kernel` does not know.
    """
    passed, absent = _names(kernel, function, tuple(values), tuple(defaults))
    return {name: values[name] for name in passed} | {name: defaults[name] for name in absent}


@RUNTIME.cache(maxsize=256)
def _names(
    kernel: str, function: Callable[..., Any], known: tuple[str, ...], defaults: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names to take from the values and from the defaults, worked out once for each
    function and set of names.
    """
    parameters = parameters_of(function)
    passed = tuple(name for name in parameters if name in known)
    absent = tuple(
        name for name, p in parameters.items() if p.default is p.empty and name not in passed
    )
    unknown = [name for name in absent if name not in defaults]
    if unknown:
        raise KernelError(
            f"kernel={kernel!r}: {name_of(function)} of the installed version needs "
            f"{', '.join(unknown)}, which cp_ring does not know"
        )
    return passed, absent


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name for error messages."""
    return getattr(getattr(function, "_init_fn", function), "__name__", str(function))
