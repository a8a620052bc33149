"""The errors that users meet.

Each derives from `ValueError` and carries one line: what is wrong, with which values, and which
setting to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from types import NoneType
from typing import Any


class ConfigError(ValueError):
    """A combination of settings that cannot run. Each argument of the error is one reason."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class Reasons:
    """Collects the reasons of several checks, so that one error reports them together."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    @contextlib.contextmanager
    def of(self) -> Iterator[None]:
        """Collect the reasons of a `ConfigError`. Later checks may fail because of it: their errors
        of other types are reasons too, with their types.
        """
        try:
            yield
        except ConfigError as error:
            self.found |= dict.fromkeys(map(str, error.args))
        except Exception as error:
            if not self.found:
                raise
            self.found[f"a later check ended in {type(error).__name__}: {one_line(error)}"] = None

    def end(self) -> None:
        """Raise `ConfigError` with all reasons, if there are any."""
        if self.found:
            raise ConfigError(*self.found)


class PlanError(ValueError):
    """A plan, or a call's tensors under it, is wrong: the message names ranks, hops and token
    ranges.
    """


class KernelError(ValueError):
    """A kernel is not installed, or does not support the plan, the dtype or the head sizes."""


_WORDS: dict[type, str] = {
    bool: "True or False", Real: "a number", str: "a name", Iterable: "a list", Sequence: "a list",
    NoneType: "None",
}  # fmt: skip


def expect(what: str, value: Any, *kinds: type[Any]) -> Any:
    """Return `value`, the argument named `what`, if it has one of these types; True is not a
    number. Raises `ConfigError` otherwise.
    """
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    wanted = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds)
    name = type(value).__name__
    plain = isinstance(value, str | Real | None) or name == "bool"  # numpy's
    shown = f"={value!r}" if plain else f" is of type {name}"
    raise ConfigError(f"{what}{shown}: it must be {wanted}")


def one_line(message: object) -> str:
    """Return the text of another library's error in one line."""
    return " ".join(str(message).split())
