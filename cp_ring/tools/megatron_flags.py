"""The words of Megatron's command line for the keys of a YAML file."""

from __future__ import annotations

import argparse
from os.path import expanduser
from typing import Any


def words_of(parser: argparse.ArgumentParser, key: str, value: Any) -> list[str]:
    """Return the words of the command line for a setting whose key is Megatron's flag in
    snake_case. The parser says what is wrong with them.

    A list becomes several values, or one, as in `128,0` or `[0,1]`, if the flag takes one. True
    becomes a flag without a value, and None nothing. False becomes nothing or, if Megatron has a
    negative flag (`--no-rope-fusion` for apply_rope_fusion), that flag. ~ at the start of a path
    becomes the home directory, as by a shell.
    """
    known = parser._option_string_actions
    as_it_is = f"--{key}"
    dashes = as_it_is.replace("_", "-")
    flag = as_it_is if as_it_is in known else dashes
    action = known.get(flag)
    switch = action is not None and action.nargs == 0
    if isinstance(value, bool):
        off = [
            name
            for name, other in known.items()
            if other.dest == key
            and (isinstance(other, argparse._StoreFalseAction) or name.startswith("--no-"))
        ]
        if value:
            return [] if action is None and off else [flag]
        return off[:1] or [flag] * (not switch)
    if value is None:
        return []
    values = [*map(expanduser, map(str, value if isinstance(value, list) else [value]))]
    if len(values) > 1 and action is not None and action.nargs is None:
        text = ",".join(values)
        try:
            (action.type or str)(text)  # type: ignore[operator]
            values = [text]
        except (KeyError, ValueError):
            values = [f"[{text}]"]
    # a value that starts with a dash would be read as a flag of its own
    joined = len(values) == 1 and (switch or values[0].startswith("-"))
    return [f"{flag}={values[0]}"] if joined else [flag, *values]
