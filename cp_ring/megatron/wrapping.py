"""Functions with something around them: what patches put in the place of Megatron's and torch's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def around(hook: Function) -> Callable[[Function], Function]:
    """Makes of `hook(original, ...)` a function that wraps another one, `original`.

    A call of the wrapped function, or method, calls the hook with the same arguments behind it.
    """

    @functools.wraps(hook)
    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        return call

    return wrap


def loaded_modules(prefix: str) -> list[Any]:
    """The modules whose names begin with `prefix` and that are imported already."""
    return [module for name, module in [*sys.modules.items()] if name.startswith(prefix) and module]
