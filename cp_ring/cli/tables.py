"""Tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(entries: list[dict[str, str]]) -> None:
    """Prints each entry on a line of its own. All have the same keys; the columns are in the order of the first entry."""
    shown = Table(show_lines=True)
    for column in entries[0]:
        shown.add_column(column, overflow="fold")
    for entry in entries:
        shown.add_row(*entry.values())
    Console().print(shown)
