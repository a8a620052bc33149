"""`cp-ring train`, `compare`, `certify` and `doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.tools.cli.option_models import AsJson, Job, Overrides, Verbose

_COLORS = {"good": "green", "absent": "yellow", "problem": "red"}


def _list_configurations(wanted: bool) -> None:
    if wanted:
        from cp_ring.tools.cli.terminal import print_table
        from cp_ring.tools.job.job_config import summaries

        print_table(summaries())
        raise typer.Exit


_LIST = typer.Option(
    "--list",
    is_eager=True,
    callback=_list_configurations,
    help="List the packaged configurations.",
)


def train_command(
    config: Job,
    set_: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command line and stop.")
    ] = False,
    verbose: Verbose = False,
    list_: Annotated[bool, _LIST] = False,
    again: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train the job of a configuration, or resume it, on this machine's GPUs, or on its CPU if it
    has no GPU.
    """
    from cp_ring.tools.job.train import train

    raise typer.Exit(train(config, set_ or [], dry_run, verbose, again))


def compare_command(
    config: Job,
    set_: Overrides = None,
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
    from cp_ring.tools.job.compare_jobs import compare, train

    facts = compare(config, set_ or [], steps, out, train)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _show_comparison(facts)


def _show_comparison(facts: dict[str, Any]) -> None:
    from cp_ring.observe import progress
    from cp_ring.tools.job.compare_jobs import BASELINE, RING

    sides = [facts[RING], facts[BASELINE]]
    title = f"{facts['job']}: {facts['steps']} steps each"
    table = Table("", *(side["name"] for side in sides), title=title)

    def add(name: str, form: str, value: Callable[[dict[str, Any]], float | None]) -> None:
        values = map(value, sides)
        table.add_row(name, *("-" if each is None else format(each, form) for each in values))

    add("ranks", "", lambda side: side["ranks"])
    for name in ("lm loss", progress.GRADIENT_NORM, progress.LEARNING_RATE):
        add(f"{name}, first step", ".6g", partial(_value_of_step, 0, name))
        add(f"{name}, last step", ".6g", partial(_value_of_step, -1, name))
    add("tokens/s, median", ",.0f", lambda side: side["tokens_per_s"])
    add("memory of a rank, GiB", ".2f", lambda side: side["memory_bytes"] / 2**30)
    add("waiting in attention, ms a step", ".1f", lambda side: side["exposed_ms"])
    add("share of attention", ".1%", lambda side: side["exposed_share"])
    console = Console()
    console.print(table)
    for name, value in facts["difference"].items():
        if value is not None:
            console.print(f"largest relative difference of {name}: {value:.2g}")
    for reason in facts[BASELINE]["because"]:
        console.print(f"not compared with a closer job: {reason}", soft_wrap=True)
    console.print(
        f"jobs, logs and steps are in {facts['folder']}; waiting is measured for cp_ring alone",
        soft_wrap=True,
    )


def _value_of_step(place: int, name: str, side: dict[str, Any]) -> float | None:
    value: float | None = side["trace"][place][name]
    return value


def certify_command(
    config: Job, set_: Overrides = None, as_json: AsJson = False, verbose: Verbose = False
) -> None:
    """Probe a job's attention, loss and gradients on its ranks, and print the results. Trains
    nothing.
    """
    from cp_ring.tools.job.certify_job import certify

    with _stdout_to(2):  # so that stdout holds only the result
        code, record = certify(config, set_ or [], verbose)
    if record is not None:
        if as_json:
            print(json.dumps(record, indent=2))
        else:
            Console(width=None if sys.stdout.isatty() else 160).print(probe_table(record))
            print(f"cp_ring: {closing_line(record)}")
    raise typer.Exit(code)


@contextlib.contextmanager
def _stdout_to(file: int) -> Iterator[None]:
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


def probe_table(record: dict[str, Any]) -> Table:
    """The probes, one per line."""
    shown = Table()
    for column in ("probe", "layer", "mask", "error", "bound", "result"):
        shown.add_column(column, justify="right" if column in ("error", "bound") else "left")
    for probe in record["probes"]:
        form = ".1e" if probe["bound"] else ".0f"
        shown.add_row(
            probe["name"],
            probe["layer"],
            probe["mask"],
            format(probe["error"], form),
            format(probe["bound"], form),
            "passed" if probe["passed"] else f"FAILED {probe['where']}",
        )
    return shown


def closing_line(record: dict[str, Any]) -> str:
    """How many probes passed, in how many seconds, and what they do not cover."""
    probes, missing = record["probes"], record["about"]["not_covered"]
    passed = sum(probe["passed"] for probe in probes)
    left_out = f"; not covered: {', '.join(missing)}" if missing else ""
    return f"{passed} of {len(probes)} probes passed in {record['seconds']:.1f} s{left_out}"


def doctor_command(as_json: AsJson = False) -> None:
    """Show what this installation can do, what it cannot do, and what is wrong with it. The exit
    code is 1 for a problem.
    """
    from cp_ring.tools.job import doctor

    # what packages print when they are imported would break the report and its JSON
    with open(os.devnull, "w") as nowhere, _stdout_to(nowhere.fileno()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere):
            findings = doctor.examine()
    wrong = doctor.problems(findings)
    if as_json:
        facts = {"ok": not wrong, "problems": wrong, "findings": [*map(asdict, findings)]}
        typer.echo(json.dumps(facts, indent=2))
        raise typer.Exit(1 if wrong else 0)
    for section in dict.fromkeys(finding.section for finding in findings):
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False)
        these = [finding for finding in findings if finding.section == section]
        for finding in these:
            state = f"[{_COLORS[finding.state]}]{finding.state}"
            advice = [finding.advice] if any(each.advice for each in these) else []
            table.add_row(finding.name, state, finding.found, *advice)
        Console().print(table)
    for line in wrong:
        typer.echo(f"cp_ring: problem: {line}", err=True)
    count = f"{len(wrong)} problem(s), see above" if wrong else "no problem found"
    typer.echo(f"cp_ring: {count}")
    raise typer.Exit(1 if wrong else 0)
