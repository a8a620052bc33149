"""What commands print: tables, or the same facts as JSON; and the commands about this installation,
`cp-ring flags`, `patches` and `doctor`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.tools.cli.option_models import AsJson

_COLORS = {"good": "green", "absent": "yellow", "problem": "red"}


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


def print_entries(entries: Sequence[Mapping[str, object]], whole: Sequence[str] = ()) -> None:
    """Prints each entry on a line of its own; all have the same keys.

    The columns in `whole` are not wrapped.
    """
    table = Table(show_lines=True)
    for column in entries[0]:
        table.add_column(column, overflow="fold", no_wrap=column in whole)
    for entry in entries:
        table.add_row(*map(str, entry.values()))
    Console().print(table)


def flags_command(as_json: AsJson = False) -> None:
    """
    List the flags that cp_ring adds to a Megatron script: default, values, and what each does.
    """
    from cp_ring.options import Options

    entries = Options.table()
    emit(entries, as_json, lambda: print_entries(entries, whole=("flag",)), indent=1)


def patches_command() -> None:
    """List every place where cp_ring changes other code at run time, and its state for the
    installed versions.
    """
    from cp_ring.patches import table

    print_entries(table())


@contextlib.contextmanager
def stdout_to(file: int) -> Iterator[None]:
    """Sends what this process and its ranks print to another open file."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(file, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def doctor_command(as_json: AsJson = False) -> None:
    """Show what this installation can do, what it cannot do, and what is wrong with it. The exit
    code is 1 for a problem.
    """
    from cp_ring.tools.job import doctor

    # what packages print when they are imported would break the report and its JSON
    with open(os.devnull, "w") as nowhere, stdout_to(nowhere.fileno()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere):
            findings = doctor.examine()
    problems = doctor.problems(findings)

    def show() -> None:
        for section in dict.fromkeys(finding.section for finding in findings):
            table = Table(
                title=section, title_justify="left", title_style="bold", show_header=False
            )
            listed = [finding for finding in findings if finding.section == section]
            for finding in listed:
                state = f"[{_COLORS[finding.state]}]{finding.state}"
                advice = [finding.advice] if any(each.advice for each in listed) else []
                table.add_row(finding.name, state, finding.found, *advice)
            Console().print(table)
        for line in problems:
            typer.echo(f"cp_ring: problem: {line}", err=True)
        count = f"{len(problems)} problem(s), see above" if problems else "no problem found"
        typer.echo(f"cp_ring: {count}")

    facts = {"ok": not problems, "problems": problems, "findings": [*map(asdict, findings)]}
    emit(facts, as_json, show, indent=2)
    raise typer.Exit(1 if problems else 0)
