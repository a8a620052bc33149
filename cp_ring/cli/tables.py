"""Tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(entries: list[dict[str, str]], whole: Sequence[str] = ()) -> None:
    """Prints each entry on a line of its own. All have the same keys; the columns are in the order of the first entry.

    The columns in `whole` are not wrapped.
    """
    shown = Table(show_lines=True)
    for column in entries[0]:
        shown.add_column(column, overflow="fold", no_wrap=column in whole)
    for entry in entries:
        shown.add_row(*entry.values())
    Console().print(shown)


def told(measured: dict[str, Sequence[dict[str, Any]]], as_json: bool) -> bool:
    """Prints a measurement, {name: results}, as JSON, or why there is none; returns whether there is a table to print instead."""
    from cp_ring.bench.machine import facts

    if as_json:
        print(json.dumps({**facts(), **measured}))
        return False
    skipped = next((results[0]["skipped"] for results in measured.values() if "skipped" in results[0]), None)
    if skipped:
        Console().print(f"not measured: {skipped}", soft_wrap=True)
    return not skipped


def print_measured(table: Table) -> None:
    """Prints a table, and below it where and when it was measured."""
    from cp_ring.bench.machine import facts

    made = facts()
    console = Console()
    console.print(table)
    console.print(f"{made['date']}; {made['machine']}, load {made['load']}; torch {made['versions']['torch']}", soft_wrap=True)
