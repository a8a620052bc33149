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
    """A setting, or a combination of settings, that cannot run. Each argument is a reason."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class Reasons:
    """Collects what several checks reject, so that it is raised together."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    @contextlib.contextmanager
    def of(self) -> Iterator[None]:
        """Keeps the reasons of a `ConfigError`. After one, what is wrong may break other checks."""
        try:
            yield
        except ConfigError as error:
            self.found |= dict.fromkeys(map(str, error.args))
        except Exception:
            if not self.found:
                raise

    def end(self) -> None:
        """Raises `ConfigError` with all reasons, if there are any."""
        if self.found:
            raise ConfigError(*self.found)


class PlanError(ValueError):
    """A plan that is not right: the message names rank, hop and token ranges."""


class KernelError(ValueError):
    """A kernel that is not installed, or cannot do what the plan, dtype or head sizes need."""


_WORDS: dict[type, str] = {
    bool: "True or False", Real: "a number", str: "a name", Iterable: "a list", Sequence: "a list",
    NoneType: "None",
}  # fmt: skip


def expect(what: str, value: Any, *kinds: type[Any]) -> Any:
    """`value`, the argument `what`, of one of these types; True is no number. Raises `ConfigError`
    for another one.
    """
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return value
    wanted = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds)
    plain = isinstance(value, str | Real | None)
    shown = f"={value!r}" if plain else f" is of type {type(value).__name__}"
    raise ConfigError(f"{what}{shown}: it must be {wanted}")


def one_line(message: object) -> str:
    """The text of an error of other software in one line."""
    return " ".join(str(message).split())
