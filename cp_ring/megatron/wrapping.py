"""Functions with something around them: what patches put in the place of Megatron's and torch's;
and attributes that are replaced for a while.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


def arguments_of(function: Function, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters; those that are not given are left
    out.
    """
    return inspect.signature(function).bind_partial(*args, **kwargs).arguments


def loaded_modules(prefix: str) -> list[Any]:
    """The modules whose names begin with `prefix` and that are imported already."""
    return [module for name, module in [*sys.modules.items()] if name.startswith(prefix) and module]


def before_first_call(module: Any, name: str, act: Callable[[Any], None]) -> None:
    """Calls `act` with `module` before its first forward pass, once for each `name`.

    What constructors of subclasses make is there by then.
    """
    if name in vars(module):
        return

    def once(layer: Any, *_: Any) -> None:
        vars(layer)[name].remove()
        act(layer)

    vars(module)[name] = module.register_forward_pre_hook(once)


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes, given as (owner, name, value), and afterwards restores exactly what was
    there: an owner that had none of its own has none again.
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
