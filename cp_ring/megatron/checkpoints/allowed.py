"""What a pickle may do with a name: calls with checked arguments, and states of objects."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import pathlib
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cp_ring.errors import ConfigError

ADVICE = "it is not loaded; if you trust its origin, give --cp-ring-trust-checkpoint"


class Rejected(ConfigError, pickle.UnpicklingError):
    """A checkpoint holds something that loading must not build."""


def rejected(what: str) -> Rejected:
    return Rejected(f"the checkpoint holds a pickle {what}, which could run code: {ADVICE}")


# Entries: what a pickle may do with a name.

Check = Callable[[Any], bool]


@dataclass(frozen=True, eq=False, repr=False)
class Allowed:
    """Stands for a name while a pickle is read.

    Attributes:
        name: the name as pickles have it.
        make: called with arguments that pass `takes`; None for a name that is only handed to other
        entries.
        takes: a check of each argument; the last ones may be missing, `least` must be there. None
        lets any arguments pass.
        fill: called with an object that `make` has made in this load, and its state; None where it
        takes none.
        new: makes the object where the pickle leaves `__init__` out; None where `make` does.
    """

    name: str
    make: Callable[..., Any] | None = None
    takes: tuple[Check, ...] | None = ()
    least: int = 0
    fill: Callable[[Any, Any], None] | None = None
    new: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return self.name

    def call(self, args: Any, new: bool = False) -> Any:
        """The object of these arguments; raises `Rejected` where it does not take them."""
        make = self.new or self.make if new else self.make
        if make is None or type(args) is not tuple or not self._accepts(args):
            raise rejected(f"that calls {self.name} with {args!r:.60}")
        return make(*args)

    def _accepts(self, args: tuple[Any, ...]) -> bool:
        if self.takes is None:
            return True
        return self.least <= len(args) <= len(self.takes) and all(map(_passes, self.takes, args))


def _passes(check: Check, value: Any) -> bool:
    return check(value)


def of(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def is_one_of(*things: Any) -> Check:
    return lambda value: any(value is thing for thing in things)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def are_counts(value: Any) -> bool:
    return type(value) in (tuple, torch.Size) and all(map(is_count, value))


def table_of(*entries: Allowed) -> dict[str, Allowed]:
    return {entry.name: entry for entry in entries}


def is_state(state: Any) -> bool:
    return type(state) is dict and all(
        type(key) is str and not key.startswith("__") for key in state
    )


def fill_attributes(target: Any, state: Any) -> None:
    """The attributes of an instance."""
    if not is_state(state):
        raise rejected(f"that gives the state {state!r:.60} to {type(target).__name__}")
    target.__dict__.update(state)


def fill_by_own(check: Check) -> Callable[[Any, Any], None]:
    """By the object's own `__setstate__`, where `check` lets the state pass."""

    def fill(target: Any, state: Any) -> None:
        if not check(state):
            raise rejected(f"that gives the state {state!r:.60} to {type(target).__name__}")
        target.__setstate__(state)

    return fill


def tuple_of(*checks: Check) -> Check:
    return lambda value: (
        type(value) is tuple and len(value) == len(checks) and all(map(_passes, checks, value))
    )


def by_value(kind: Any, name: str) -> Allowed:
    """The entry of an enumeration: its members by their values, and nothing new."""

    def look_up(value: Any) -> Any:
        for member in kind.__members__.values():
            if type(member.value) is type(value) and member.value == value:
                return member
        raise rejected(f"of the value {value!r:.60}, which {name} does not have")

    return Allowed(name, look_up, (lambda value: True,), 1)


INT = of(int)
TEXT = of(str)
BYTES = of(bytes)
FLAG = of(bool)
LIST = of(list)
INT_OR_NONE = of(int, types.NoneType)
PLAIN = table_of(
    Allowed("builtins.set", set, (LIST,)),
    Allowed("builtins.frozenset", frozenset, (LIST,)),
    Allowed("builtins.bytes", bytes),
    Allowed("builtins.bytearray", bytearray, (BYTES,)),
    Allowed("builtins.complex", complex, (of(float), of(float)), 2),
    Allowed("builtins.range", range, (INT, INT, INT), 3),
    Allowed("builtins.slice", slice, (INT_OR_NONE,) * 3, 3),
    Allowed(
        "_codecs.encode",
        lambda text, _: text.encode("latin-1"),
        (TEXT, lambda code: code in ("latin1", "latin-1")),
        2,
    ),
    Allowed("collections.OrderedDict", collections.OrderedDict, (LIST,), fill=fill_attributes),
    Allowed("collections.Counter", collections.Counter, (of(dict),)),
    Allowed("collections.deque", collections.deque, (of(tuple, list), INT_OR_NONE)),
    Allowed("argparse.Namespace", argparse.Namespace, fill=fill_attributes),
    Allowed("types.SimpleNamespace", types.SimpleNamespace, fill=fill_attributes),
    Allowed(
        "_io.BytesIO",
        io.BytesIO,
        (),
        fill=fill_by_own(tuple_of(BYTES, is_count, of(types.NoneType))),
    ),
    Allowed("datetime.date", datetime.date, (BYTES,), 1),
    Allowed("datetime.time", datetime.time, (BYTES, of(datetime.timezone)), 1),
    Allowed("datetime.datetime", datetime.datetime, (BYTES, of(datetime.timezone)), 1),
    Allowed("datetime.timedelta", datetime.timedelta, (INT,) * 3, 3),
    Allowed("datetime.timezone", datetime.timezone, (of(datetime.timedelta), TEXT), 1),
    *(
        Allowed(f"pathlib.{kind.__name__}", lambda *parts, kind=kind: kind(*parts), (TEXT,) * 256)
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    ),
    Allowed("torch.Size", torch.Size, (are_counts,), 1),
    Allowed("torch.device", torch.device, (TEXT, is_count), 1),
    Allowed(
        "torch.serialization._get_layout",
        lambda name: torch_value(name.removeprefix("torch.")),
        (TEXT,),
        1,
    ),
)


def torch_value(name: str) -> Any:
    """torch's data type, layout or memory format of that name: these pickle by name."""
    value = vars(torch).get(name)  # getattr could import a module
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise rejected(f"of torch.{name}")
    return value
