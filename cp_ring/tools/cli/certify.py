"""`cp-ring certify`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def certify_command(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a packaged one (quickstart).")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="Override a key; the value is read as YAML. Repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all output of the ranks.")
    ] = False,
) -> None:
    """Probe a job's attention, loss and gradients on its ranks, and print the results. Trains
    nothing.
    """
    from cp_ring.tools.job.certify import certify

    with _stdout_as_stderr():
        code, found = certify(config, set_ or [], verbose)
    if found is not None:
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            Console(width=None if sys.stdout.isatty() else 160).print(probe_table(found))
            print(f"cp_ring: {closing_line(found)}")
    raise typer.Exit(code)


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Sends what this process and its ranks print to stderr, so that stdout holds only the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def probe_table(found: dict[str, Any]) -> Table:
    """The probes, one per line."""
    shown = Table()
    for column in ("probe", "layer", "mask", "error", "bound", "result"):
        shown.add_column(column, justify="right" if column in ("error", "bound") else "left")
    for probe in found["probes"]:
        result = "passed" if probe["passed"] else f"FAILED {probe['where']}"
        error, bound = (
            f"{probe[name]:.1e}" if probe["bound"] else f"{probe[name]:.0f}"
            for name in ("error", "bound")
        )
        shown.add_row(probe["name"], probe["layer"], probe["mask"], error, bound, result)
    return shown


def closing_line(found: dict[str, Any]) -> str:
    """How many probes passed, in how many seconds, and what they do not cover."""
    passed = sum(probe["passed"] for probe in found["probes"])
    missing = found["about"]["not_covered"]
    left_out = f"; not covered: {', '.join(missing)}" if missing else ""
    return f"{passed} of {len(found['probes'])} probes passed in {found['seconds']:.1f} s{left_out}"
