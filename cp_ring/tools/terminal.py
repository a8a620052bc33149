"""The parts that commands share: options, numbers of tokens, tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from cp_ring.errors import PlanError
from cp_ring.plan.sizes.device_rates import NAMED, use

JobName = Annotated[
    str,
    typer.Argument(
        help="A YAML file, or the name of a packaged one (docs/configurations.md).", metavar="JOB"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Override a key; the value is read as YAML. Repeatable.",
    ),
]


DEFAULT_DEVICE = "h100"
Device = Annotated[
    str, typer.Option(metavar="NAME", help=f"Its rates, all assumed: {', '.join(NAMED)}.")
]


def choose_for(device: str) -> None:
    """Choose and predict by the rates of a device from now on. Raises `PlanError` for an unknown
    name.
    """
    if device not in NAMED:
        raise PlanError(f"--device {device}: known are {', '.join(NAMED)}")
    use(device)


_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NUMBER = re.compile(r"(?i)([+-]?\d+)([kmg]?)")


def parse_tokens(text: str) -> int:
    """Read a number of tokens: 65536, 64K, 128k or 1M, where K is 1,024, M is 1,024 K and G is
    1,024 M.

    Raises `typer.BadParameter`. Typer turns it into one line that names the option.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match:
        return int(match[1]) * _FACTORS[match[2].lower()]
    raise typer.BadParameter(f"{text!r} is not a number of tokens such as 65536, 64K or 1M")


def emit(facts: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Print the facts as JSON, or call `show`, which prints them for people."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show()


def show_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table of texts and numbers."""
    right = (Column(name, justify="right", overflow="fold") for name in columns)
    table = Table(*right, title=title)
    for row in rows:
        table.add_row(*map(_cell, row))
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
