"""Options of commands as fields of a dataclass, and parsers of option values that several commands
share.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from cp_ring.errors import ConfigError

JSON = "Print JSON instead of the table."
SET = "Override a key (the value is read as YAML), or preset=NAME. Repeatable."

JOB = "A YAML file, or the name of a packaged one (cp-ring train --list)."

AsJson = Annotated[bool, typer.Option("--json", help=JSON)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show all output of the ranks.")]
Job = Annotated[str, typer.Argument(help=JOB, metavar="JOB")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help=SET)]


def _writable(param: typer.CallbackParam, path: Any) -> Any:
    """Callback: a file can be written there, which is asked before any work."""
    if path is not None:
        existed = Path(path).exists()
        try:
            Path(path).open("ab").close()
        except OSError as error:
            raise ConfigError(f"{param.opts[0]} {path}: cannot write: {error.strerror}") from None
        if not existed:
            Path(path).unlink()
    return path


WRITTEN: dict[str, Any] = {"metavar": "PATH", "callback": _writable}
"""Of options that name a file to write."""


class _Quiet:
    """Help without "<bool>" behind each switch, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for switch in (param for param in params if getattr(param, "is_flag", False)):
            switch.metavar = ""
        return params


class QuietCommand(_Quiet, TyperCommand):
    """A command."""


class QuietGroup(_Quiet, TyperGroup):
    """A group of commands."""


def option(default: Any, text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A field of a dataclass of options, with its help, and the panel that has it there; `names`
    and `more` are as in `typer.Option`. MISSING: it is required.
    """
    info = typer.Option(*names, help=text, rich_help_panel=panel, **more)
    return field(default=default, metadata={"typer": info})


def argument(text: str, default: Any = None, **more: Any) -> Any:
    """As `option`, of a value without a name."""
    return field(default=default, metadata={"typer": typer.Argument(help=text, **more)})


def command[T](options: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """A command with the options of a dataclass. It calls `run`, whose docstring is the help, with
    an instance.
    """

    def with_options(**values: Any) -> None:
        run(options(**values))

    hints = get_type_hints(options)
    parameters = []
    of_all_last = sorted(
        fields(options),  # type: ignore[arg-type]
        key=lambda one: one.name == "as_json",
    )
    for one in of_all_last:
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        hint: Any = operator.getitem(Annotated, (hints[one.name], one.metadata["typer"]))
        parameters.append(
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )
        )
    with_options.__doc__ = run.__doc__
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NUMBER = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)([kmg]?)", re.IGNORECASE)


def parse_tokens(text: str | int) -> int:
    """A number of tokens: 65536, 64K, 128k or 1M, where K is 1,024, M is 1,024 K and G is 1,024 M.

    Raises `typer.BadParameter`. Typer turns it into one line that names the option.
    """
    match = _NUMBER.fullmatch(str(text).strip())
    if match:
        factor = _FACTORS[match[2].lower()]
        digits = match[1].replace("_", "")
        if "." not in digits:
            return int(digits) * factor
        if (value := float(digits) * factor).is_integer():
            return int(value)
    raise typer.BadParameter(f"{str(text)!r} is not a number of tokens such as 65536, 64K or 1M")


def parse_mean_tokens(text: str | float) -> float:
    """An average number of tokens: any number, or a text that `parse_tokens` accepts."""
    try:
        return float(text)
    except ValueError:
        return float(parse_tokens(str(text)))


def parse_numbers(text: str, count: int) -> list[int] | None:
    """So many whole numbers of at least 1, with commas between; None for another text."""
    numbers = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    return numbers if len(numbers) == count and min(numbers) > 0 else None
