"""Wraps functions of Megatron and torch for patches, and replaces attributes for a while."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Function = Callable[..., Any]

ForwardStep = Callable[[Any, Any], tuple[Any, Function]]
"""Megatron's forward step: of a data iterator and a model, the output and the loss function."""


def around(hook: Function) -> Callable[[Function], Function]:
    """Turn `hook(original, ...)` into a decorator that wraps a function `original`.

    A call of the wrapped function, or method, calls the hook with the original and the same
    arguments.
    """

    @functools.wraps(hook)
    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        for name in ("cache_clear", "cache_info"):  # Megatron clears the cache of one function
            if hasattr(original, name):
                setattr(call, name, getattr(original, name))
        return call

    return wrap


def arguments_of(function: Function, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, without defaults."""
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments


def loaded_modules(prefix: str) -> list[Any]:
    """Return the imported modules whose names begin with `prefix`."""
    return [module for name, module in [*sys.modules.items()] if name.startswith(prefix) and module]


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, given as (owner, name, value), and restore them afterwards. An owner that had
    no attribute of its own has none again.
    """
    with ExitStack() as stack:
        for owner, name, value in changes:
            own = getattr(owner, "__dict__", {})
            if name in own:
                stack.callback(setattr, owner, name, own[name])
            elif inspect.isdatadescriptor(getattr(type(owner), name, None)):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield
