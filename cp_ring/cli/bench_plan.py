"""`cp-ring bench plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson


def bench_plan(
    as_json: AsJson = False,
    repeats: Annotated[int, typer.Option(min=1, help="Each time is the best of this many.")] = 5,
) -> None:
    """Measure planning: time, memory, bytes on the wire and balance, each with its goal."""
    from rich.console import Console
    from rich.table import Table

    from cp_ring.bench.plan import run

    results = run(repeats)
    if as_json:
        typer.echo(json.dumps([result._asdict() for result in results]))
        return
    table = Table("", "measured", "goal (at most)", title="cp_ring planning")
    for what, measured, unit, goal in results:
        table.add_row(what, f"{measured:.3g} {unit}", f"{goal:g} {unit}" if goal else "")
    Console().print(table)
