"""`cp-ring compare`: a job with cp_ring and without it, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_ring.tools.cli.options import AsJson


def compare_job_command(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a packaged one (quickstart).")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C",
            help="Override a key (the value is read as YAML), or preset=NAME. Repeatable.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each of the two jobs.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="An empty folder for both; default: the run directory with -compare.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a job for some steps with cp_ring and without it, and show losses, speed, memory and
    waiting side by side.

    Without cp_ring is stock context parallelism of the same size on GPUs with TransformerEngine,
    else context parallel size 1.
    """
    from cp_ring.tools.job.compare import compare, train

    found = compare(config, set_ or [], steps, out, train)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cp_ring.observe import progress
    from cp_ring.tools.job.compare import BASELINE, RING

    sides = [found[RING], found[BASELINE]]
    table = Table(
        "", *(side["name"] for side in sides), title=f"{found['job']}: {found['steps']} steps each"
    )
    table.add_row("ranks", *(str(side["ranks"]) for side in sides))
    for name in ("lm loss", progress.GRADIENT_NORM, progress.LEARNING_RATE):
        for place, word in ((0, "first"), (-1, "last")):
            table.add_row(
                f"{name}, {word} step",
                *(_number(side["trace"][place][name], ".6g") for side in sides),
            )
    table.add_row("tokens/s, median", *(f"{side['tokens_per_s']:,.0f}" for side in sides))
    table.add_row(
        "memory of a rank, GiB", *(f"{side['memory_bytes'] / 2**30:.2f}" for side in sides)
    )
    table.add_row(
        "waiting in attention, ms a step", *(_number(side["exposed_ms"], ".1f") for side in sides)
    )
    table.add_row("share of attention", *(_number(side["exposed_share"], ".1%") for side in sides))
    console = Console()
    console.print(table)
    for name, value in found["difference"].items():
        if value is not None:
            console.print(f"largest relative difference of {name}: {value:.2g}")
    for reason in found[BASELINE]["because"]:
        console.print(f"not compared with a closer job: {reason}", soft_wrap=True)
    console.print(
        f"jobs, logs and steps are in {found['folder']}; waiting is measured for cp_ring alone",
        soft_wrap=True,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
