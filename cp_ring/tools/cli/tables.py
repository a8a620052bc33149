"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_table(entries: list[dict[str, str]], whole: Sequence[str] = ()) -> None:
    """Prints each entry on a line of its own. All have the same keys; the columns are in the order
    of the first entry.

    The columns in `whole` are not wrapped.
    """
    shown = Table(show_lines=True)
    for column in entries[0]:
        shown.add_column(column, overflow="fold", no_wrap=column in whole)
    for entry in entries:
        shown.add_row(*entry.values())
    Console().print(shown)
