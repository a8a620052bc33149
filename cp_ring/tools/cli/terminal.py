"""What commands print: tables, or the same facts as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def emit(facts: Any, as_json: bool, show: Callable[[], object], indent: int | None = None) -> None:
    """Prints the facts as JSON, or calls `show`, which prints them for people."""
    if as_json:
        typer.echo(json.dumps(facts, indent=indent))
    else:
        show()


def show_table(
    title: str,
    words: str,
    numbers: Sequence[str],
    lines: Iterable[Sequence[str]],
) -> None:
    """Prints a table: `words` names a first column of words, if any, before those of numbers."""
    table = Table(title=title)
    if words:
        table.add_column(words, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def mib(size: float) -> str:
    """Bytes as MiB, with one digit behind the point."""
    return f"{size / 2**20:,.1f}"
