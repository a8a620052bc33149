"""Tables on the terminal; `cp-ring flags` and `cp-ring patches`, which print nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.tools.cli.option_models import AsJson


def print_table(entries: list[dict[str, str]], whole: Sequence[str] = ()) -> None:
    """Prints each entry on a line of its own; all have the same keys.

    The columns in `whole` are not wrapped.
    """
    shown = Table(show_lines=True)
    for column in entries[0]:
        shown.add_column(column, overflow="fold", no_wrap=column in whole)
    for entry in entries:
        shown.add_row(*entry.values())
    Console().print(shown)


def flags_command(as_json: AsJson = False) -> None:
    """
    List the flags that cp_ring adds to a Megatron script: default, values, and what each does.
    """
    from cp_ring.options import Options

    entries = Options.table()
    if as_json:
        typer.echo(json.dumps(entries, indent=1))
    else:
        print_table(entries, whole=("flag",))


def patches_command() -> None:
    """List every place where cp_ring changes other code at run time, and its state for the
    installed versions.
    """
    from cp_ring.patches import table

    print_table(table())
