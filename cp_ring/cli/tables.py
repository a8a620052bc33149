"""Tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(rows: list[dict[str, str]]) -> None:
    """Rows of the same keys, in the order of the first one's."""
    shown = Table(show_lines=True)
    for column in rows[0]:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*row.values())
    Console().print(shown)
