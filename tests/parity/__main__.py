"""The parity matrix:
`python -m tests.parity [--models a,b] [--splits c,d] [--json] [--planted]`.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.parity import matrix
from tests.parity.matrix import Verdict
from tests.parity.models import MODELS, SPLITS


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas; all by default.")] = "",
    splits: Annotated[str, typer.Option(help="Splits, separated by commas; all by default.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects, one a cell.")
    ] = False,
    planted: Annotated[
        bool, typer.Option(help="Plant each model's fault: then every cell must be wrong.")
    ] = False,
) -> None:
    """Train each model under each split and compare it with itself at context parallel size 1; exit
    code 1 if a cell is wrong.
    """
    wanted = matrix.cells(
        _names(models, MODELS, "--models"), _names(splits, SPLITS, "--splits"), planted
    )
    verdicts = list(
        matrix.run(wanted, tell=functools.partial(print, file=sys.stderr, flush=True)).values()
    )
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    else:
        show(verdicts)
    raise typer.Exit(int(not all(verdict.expected for verdict in verdicts)))


def _names(given: str, known: tuple, flag: str) -> list[str]:
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in [item.name for item in known]:
            raise typer.BadParameter(
                f"{flag} {name}: there are {', '.join(item.name for item in known)}"
            )
    return names


def show(verdicts: list[Verdict]) -> None:
    """A table on the screen, and below it why cells were rejected or failed."""
    header, lines, notes = _table(verdicts)
    table = Table(*header)
    for line in lines:
        table.add_row(*line)
    console = Console(width=130)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _table(verdicts: list[Verdict]) -> tuple[list[str], list[list[str]], list[str]]:
    by_place = {(verdict.cell.model.name, verdict.cell.split.name): verdict for verdict in verdicts}
    models, splits = (list(dict.fromkeys(place[index] for place in by_place)) for index in (0, 1))
    notes: list[str] = []
    lines = [
        [
            model.replace("_", " "),
            *(_entry(by_place.get((model, split)), notes) for split in splits),
        ]
        for model in models
    ]
    return ["model", *splits], lines, [f"({number}) {note}" for number, note in enumerate(notes, 1)]


def _entry(verdict: Verdict | None, notes: list[str]) -> str:
    if verdict is None:
        return ""
    reason = verdict.rejected or verdict.failed
    if reason and reason not in notes:
        notes.append(reason)
    if reason:
        entry = f"{'rejected' if verdict.rejected else 'failed'} ({notes.index(reason) + 1})"
    else:
        entry = f"{max(verdict.loss_error or 0, verdict.grad_norm_error or 0):.1e}"
    return entry if verdict.expected else f"{entry} WRONG"


if __name__ == "__main__":
    typer.run(main)
