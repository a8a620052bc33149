"""Reads the value of a setting from a command line, a YAML file or a keyword.

Each function raises `ConfigError` that says what it accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field
from functools import partial
from typing import Any

from cp_ring.errors import ConfigError
from cp_ring.options import either


def joined(value: Any) -> Any:
    """Return names as text separated by commas; a YAML list is accepted too."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def only_known(what: str, known: Sequence[str], value: str) -> None:
    for name in value.split(",") if value else ():
        if name not in known:
            raise ConfigError(f"{name} is no {what}; known are {', '.join(known)}")


def on_or_off(value: Any) -> Any:
    """Return `on` or `off` for a boolean: `certify: true` in a YAML file means on."""
    return ("on" if value else "off") if isinstance(value, bool) else value


_ON = ("true", "t", "yes", "y", "on", "1")
_OFF = ("false", "f", "no", "n", "off", "0")


def _switch(value: Any) -> bool:
    word = str(value).lower()
    if not isinstance(value, bool | int | str) or word not in (*_ON, *_OFF):
        raise ConfigError("it must be true or false")
    return word in _ON


def _number(kind: type[int] | type[float], noun: str, value: Any) -> float:
    try:
        number = kind(str(value) if isinstance(value, bool) else value)
        if kind is int and isinstance(value, float) and number != value:
            raise ValueError("it has a fraction")
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"it must be {noun}") from None
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError("it must be text")
    return value


# the function that reads a value, by the annotation of its field
_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _switch,
    "int": partial(_number, int, "a whole number"),
    "float": partial(_number, float, "a number"),
    "int | str": partial(_number, int, "a whole number"),
    "str": _text,
}


def choices_of(setting: Field[Any]) -> tuple[str, ...]:
    """Return the names that a setting accepts; () if it is not a choice. Kernels, layouts and
    routes are the ones registered so far.
    """
    known = setting.metadata.get("choices", ())
    return known() if callable(known) else known


def read(setting: Field[Any], value: Any) -> Any:
    """Return the value in the setting's type. Raises `ConfigError` that says what the setting
    accepts.
    """
    limits = setting.metadata
    if "convert" in limits:
        value = limits["convert"](value)
    if limits.get("choices") and value not in choices_of(setting):
        raise ConfigError(f"it must be {either(choices_of(setting))}")
    if value in limits.get("words", ()):
        return value
    value = _READERS[str(setting.type)](value)
    if not value >= limits.get("least", value):
        raise ConfigError(f"it must be at least {limits['least']}")
    if not value <= limits.get("most", value):
        raise ConfigError(f"it must be at most {limits['most']}")
    if "check" in limits:
        limits["check"](value)
    return value
