"""Functions with something around them: what patches put in the place of Megatron's and torch's;
and attributes that are replaced for a while.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes, given as (owner, name, value), and afterwards sets them back."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
