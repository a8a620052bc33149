"""Megatron's own parser, asked about a job before any rank starts."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from cp_ring.errors import ConfigError, Reasons
from cp_ring.megatron.flags import argument_parser


@contextlib.contextmanager
def _quick_import() -> Iterator[None]:
    """Imports of Megatron take half the time: it asks for torch's compiler and for wandb when it is
    imported, and a process that only reads flags uses neither.
    """
    import torch

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return function or as_it_is

    without = {"wandb": None} if "wandb" not in sys.modules else {}
    sys.modules |= without  # type: ignore[arg-type]
    try:
        with mock.patch.object(torch, "compile", as_it_is):
            yield
    finally:
        for name in without:
            del sys.modules[name]


def build_parser() -> argparse.ArgumentParser:
    """As `argument_parser.build_parser`, in half the time."""
    with _quick_import():
        return argument_parser.build_parser()


def to_flags(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> list[str]:
    """The command line for settings whose keys are Megatron's flags in snake_case. The parser says
    what is wrong with them.

    A list becomes several values, true a flag without a value, and None nothing. False becomes
    nothing or, if Megatron has a negative flag (`--no-rope-fusion` for apply_rope_fusion), that
    flag.
    """
    known = parser._option_string_actions
    negative = {
        action.dest: flag
        for flag, action in known.items()
        if isinstance(action, argparse._StoreFalseAction)
    }
    line: list[str] = []
    for key, value in settings.items():
        dashes, as_it_is = f"--{key.replace('_', '-')}", f"--{key}"
        flag = as_it_is if as_it_is in known else dashes
        action = known.get(flag)
        switch = action is not None and action.nargs == 0
        if action is None and key in negative and isinstance(value, bool):
            line += [] if value else [negative[key]]
        elif value is False and isinstance(action, argparse.BooleanOptionalAction):
            line.append("--no-" + flag[2:])
        elif isinstance(value, bool):
            line += [] if switch and not value else [flag]
        elif value is not None:
            values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
            # a value that starts with a dash would be read as a flag of its own
            joined = len(values) == 1 and (switch or values[0].startswith("-"))
            line += [f"{flag}={values[0]}"] if joined else [flag, *values]
    return line


def check(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Parses a command line as Megatron does, with its types and choices.

    Raises `ConfigError` with argparse's messages, each of which names a flag.
    """
    try:
        return parser.parse_args(list(line))
    except ConfigError:
        reasons = Reasons()
        starts = [place for place, word in enumerate(line) if word.startswith("--")]
        for start, stop in itertools.pairwise([*starts, len(line)]):  # argparse stops at the first
            flag = line[start].partition("=")[0]
            try:
                parser.parse_args(list(line[start:stop]))
            except ConfigError as error:
                named = str(error) if flag in str(error) else f"{flag}: {error}"
                reasons.found[named] = None
        reasons.end()
        raise
