"""`cp-ring doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cp_ring.tools.job.doctor import Finding

_COLORS = {"good": "green", "absent": "yellow", "problem": "red"}


def doctor_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the tables.")
    ] = False,
) -> None:
    """Show what this installation can do, what it cannot do, and what is wrong with it. The exit
    code is 1 for a problem.
    """
    from cp_ring.tools.job import doctor

    with _quiet():
        found = doctor.examine()
    wrong = doctor.problems(found)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "ok": not wrong,
                    "problems": wrong,
                    "findings": [dataclasses.asdict(finding) for finding in found],
                },
                indent=2,
            )
        )
    else:
        _print_findings(found)
        for line in wrong:
            typer.echo(f"cp_ring: problem: {line}", err=True)
        typer.echo(
            "cp_ring: no problem found"
            if not wrong
            else f"cp_ring: {len(wrong)} problem(s), see above"
        )
    raise typer.Exit(1 if wrong else 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what packages print when they are imported. These lines would break the report and its
    JSON.
    """
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        with warnings.catch_warnings(), contextlib.redirect_stdout(open(os.devnull, "w")):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _print_findings(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for section in dict.fromkeys(finding.section for finding in found):
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False)
        for finding in found:
            if finding.section == section:
                color = _COLORS[finding.state]
                table.add_row(
                    finding.name, f"[{color}]{finding.state}", finding.found, finding.advice
                )
        console.print(table)
