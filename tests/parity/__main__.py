"""The parity matrix:
`python -m tests.parity [--models a,b] [--splits c,d] [--json] [--planted]`.
"""

import json
import time
from typing import Annotated

import typer

from tests.parity import matrix
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
):
    """Train each model under each split and compare it with itself at context parallel size 1; exit
    code 1 if a cell is wrong.
    """
    wanted = matrix.cells(
        _names(models, MODELS, "--models"), _names(splits, SPLITS, "--splits"), planted
    )
    begun = time.monotonic()

    def tell(verdict):
        typer.echo(f"{time.monotonic() - begun:6.0f} s  {line(verdict)}", err=as_json)

    verdicts = matrix.run(wanted, tell=tell).values()
    if as_json:
        print(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    raise typer.Exit(int(not all(verdict.expected for verdict in verdicts)))


def _names(given, known, flag):
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in [item.name for item in known]:
            raise typer.BadParameter(
                f"{flag} {name}: there are {', '.join(item.name for item in known)}"
            )
    return names


def line(verdict):
    """A cell in a line: its largest error, or why there is none."""
    cell, reason = verdict.cell, verdict.rejected or verdict.failed
    kind = "rejected" if verdict.rejected else "failed"
    error = max(verdict.loss_error or 0, verdict.grad_norm_error or 0)
    found = f"{kind}: {reason}" if reason else f"{error:.1e}"
    return f"{cell.model.name:42} {cell.split.name:8} {found}" + " WRONG" * (not verdict.expected)


if __name__ == "__main__":
    typer.run(main)
