"""Megatron's own parser with cp_ring's flags, and errors of one line."""

from __future__ import annotations

import argparse
import difflib
import re
import warnings
from functools import partial
from typing import Any, NoReturn

from cp_ring.errors import ConfigError
from cp_ring.megatron.compat import functions_uncompiled
from cp_ring.megatron.options import Options


def _not_of_type(match: re.Match[str]) -> str:
    kind = {"int": "a whole number", "float": "a number"}.get(match[1], f"a valid {match[1]}")
    return f"{match[2]} is not {kind}"


def _reject_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Replace argparse's `error`, which prints the usage of 800 flags: raise `ConfigError` with the
    message alone. For an unknown flag it proposes the closest known one.
    """
    message = re.sub(r"invalid (\w+) value: (.*)", _not_of_type, message)
    if message.startswith("unrecognized arguments: "):
        unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        message += "".join(_hint(flag, parser) for flag in unknown)
    raise ConfigError(message)


def _value_of(parser: argparse.ArgumentParser, action: argparse.Action, text: str) -> Any:
    """Replace argparse's `_get_value`: a KeyError of a flag's type would end in a traceback."""
    try:
        return argparse.ArgumentParser._get_value(parser, action, text)
    except KeyError:
        raise argparse.ArgumentError(action, f"invalid choice: {text!r}") from None


def _hint(flag: str, parser: argparse.ArgumentParser) -> str:
    near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"; did you mean {near[0]} in place of {flag}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the installed Megatron with cp_ring's flags. Importing Megatron takes
    several seconds.

    Raises `ConfigError` if Megatron cannot be imported.
    """
    try:
        with warnings.catch_warnings(), functions_uncompiled():
            # Megatron warns here about optional packages; the ranks print these warnings again.
            warnings.simplefilter("ignore")
            from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        raise ConfigError(
            f"megatron.training cannot be imported ({error}); install megatron-core[training] >= "
            "0.18.2"
        ) from error
    parser = argparse.ArgumentParser(
        prog="python -m cp_ring.pretrain_gpt", usage="%(prog)s [flags]", allow_abbrev=False
    )
    add_megatron_arguments(parser)
    # the patch `arguments` also adds cp_ring's flags
    if "--cp-ring" not in parser._option_string_actions:
        add_own_arguments(parser)
    return parser


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add cp_ring's flags to a parser of Megatron, as the first group of its help, and repair that
    help and its errors.
    """
    parser.error = partial(_reject_flags, parser)  # type: ignore[method-assign]
    parser._get_value = partial(_value_of, parser)  # type: ignore[method-assign]
    Options.add_arguments(parser)
    parser._action_groups.insert(0, parser._action_groups.pop())
    for action in parser._actions:
        # some help texts of Megatron have a bare %, which argparse reads as a format
        if action.help:
            action.help = re.sub(r"%(?!\(\w+\)[a-z])", "%%", action.help.replace("%%", "%"))
    return parser
