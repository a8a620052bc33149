"""The command line of `cp-ring bench host`; the measurement is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cp_ring.cli.options import AsJson


def bench_host(
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each pass that count.")] = 100,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A checkout of another version, measured in turn with this one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time what the host does in a hop beyond attention and messages: Python, merges, sums, views, the kernel's adapter."""
    from cp_ring.bench.host import run
    from cp_ring.bench.machine import facts
    from cp_ring.errors import ConfigError

    if against is not None and not (against / "cp_ring" / "__init__.py").is_file():
        raise ConfigError(f"--against {against}: there is no cp_ring/__init__.py in it")
    results = run(repeats, against)
    if as_json:
        typer.echo(json.dumps({**facts(), "rows": results}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("pass", "version", "host time of a hop, us", title="causal, 8 ranks, one source a hop, 4 heads, CPU")
    for result in results:
        table.add_row(result["pass"], result["cp_ring"], f"{result['hop_us']:.0f}")
    Console().print(table)
