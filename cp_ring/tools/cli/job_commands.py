"""The commands of jobs: `cp-ring train`, `compare`, `certify`, `submit`, `preflight`, `status` and
`watch`. Those of Slurm are also `cp-ring slurm submit` and so on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cp_ring.observe import progress
from cp_ring.tools.cli.option_models import (
    JOB,
    SET,
    WRITTEN,
    AsJson,
    Job,
    Overrides,
    Verbose,
    argument,
    option,
)
from cp_ring.tools.cli.terminal import (
    closing_line,
    emit,
    print_entries,
    probe_table,
    stdout_to,
)


def _list_configurations(switched_on: bool) -> None:
    if switched_on:
        from cp_ring.tools.job import job_config

        print_entries(job_config.summaries())
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
    from cp_ring.tools.job import train

    raise typer.Exit(train.train(config, set_ or [], dry_run, verbose, again))


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
    from cp_ring.tools.job import compare_jobs

    facts = compare_jobs.compare(config, set_ or [], steps, out, compare_jobs.train)
    emit(facts, as_json, lambda: _show_comparison(facts))


def _show_comparison(facts: dict[str, Any]) -> None:
    from cp_ring.tools.job.compare_jobs import BASELINE, RING

    sides = [facts[RING], facts[BASELINE]]
    title = f"{facts['job']}: {facts['steps']} steps each"
    table = Table("", *(side["name"] for side in sides), title=title)
    of_ring, of_baseline = map(_values, sides)
    for name in of_ring:
        table.add_row(name, of_ring[name], of_baseline[name])
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


def _values(side: dict[str, Any]) -> dict[str, str]:
    """What the table shows of one of the jobs."""
    values = {"ranks": (side["ranks"], "")}
    for name in ("lm loss", progress.GRADIENT_NORM, progress.LEARNING_RATE):
        for place, step in (("first", side["trace"][0]), ("last", side["trace"][-1])):
            values[f"{name}, {place} step"] = step[name], ".6g"
    values |= {
        "tokens/s, median": (side["tokens_per_s"], ",.0f"),
        "memory of a rank, GiB": (side["memory_bytes"] / 2**30, ".2f"),
        "waiting in attention, ms a step": (side["exposed_ms"], ".1f"),
        "share of attention": (side["exposed_share"], ".1%"),
    }
    return {
        name: "-" if value is None else format(value, form)
        for name, (value, form) in values.items()
    }


def certify_command(
    config: Job,
    set_: Overrides = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Probe a job's attention, loss and gradients on its ranks, and print the results. Trains
    nothing.
    """
    from cp_ring.tools.job import certify_job

    with stdout_to(2):  # so that stdout holds only the result
        code, record = certify_job.certify(config, set_ or [], verbose)
    if record is not None:
        emit(record, as_json, lambda: _show_certificate(record), indent=2)
    raise typer.Exit(code)


def _show_certificate(record: dict[str, Any]) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(probe_table(record))
    print(f"cp_ring: {closing_line(record)}")


_RESOURCES, _RANKS = "What to ask Slurm for", "How ranks are started"
_resource, _start = (partial(option, panel=name) for name in (_RESOURCES, _RANKS))
SECONDS = 2.0
"""Between two looks of `watch`."""
RUN_DIR = "The launch.run_dir of a job, or the --cp-ring-run-dir of a script."


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The options of `cp-ring submit`."""

    config: str = argument(JOB, MISSING, metavar="JOB")
    nodes: int = _resource(MISSING, "Nodes.")
    gpus_per_node: int | None = _resource(None, "GPUs of each node, with one rank on each.")
    ranks_per_node: int | None = _resource(None, "Ranks of each node, for jobs on the CPU.")
    set_: list[str] | None = option(None, SET, "--set", metavar="A.B=C")
    partition: str | None = _resource(None, "Slurm partition.")
    account: str | None = _resource(None, "Slurm account.")
    qos: str | None = _resource(None, "Slurm quality of service.")
    time: str | None = _resource(
        None, "Time limit of each attempt: minutes, H:MM:SS or D-HH:MM:SS."
    )
    name: str = _resource("cp_ring", "Name of the job.")
    cpus_per_rank: int | None = _resource(None, "Cores of each rank.")
    slurm: list[str] | None = option(
        None,
        "Another sbatch option: --slurm=--exclusive. Repeatable.",
        metavar="OPTION",
        panel=_RESOURCES,
    )
    warn_seconds: int = _resource(120, "Save this many seconds before the time limit.")
    launcher: str = _start("srun", "srun starts a task per rank, torchrun a task per node.")
    rank_order: Path | None = option(
        None, "File of host names in the order of their ranks.", panel=_RANKS
    )
    env_file: Path | None = option(None, "Your site's copy of launch/slurm/env.sh.", panel=_RANKS)
    container_image: str | None = _start(None, "Run in this image (pyxis and enroot).")
    container_mounts: str | None = _start(
        None, "SRC:DST,... (the run directory is always mounted)."
    )
    python: str | None = _start(
        None, "Python of the ranks; default: this one, or the image's python3."
    )
    preflight: bool = option(True, "Check nodes and links before training.")
    dry_run: bool = option(
        False, "Print the batch script and the placement, and stop.", "--dry-run"
    )


def run_submit(options: SubmitOptions) -> None:
    """Submit a job to Slurm. It saves before the time limit, resumes after failures and preemption,
    and stops when it is done.
    """
    from cp_ring.errors import ConfigError
    from cp_ring.tools.slurm.batch_script import Resources
    from cp_ring.tools.slurm.submit import Site, submit

    gpus, ranks = options.gpus_per_node, options.ranks_per_node
    if (gpus is None) == (ranks is None):
        raise ConfigError(
            "cp-ring submit: give either --gpus-per-node or, for a job on the CPU, --ranks-per-node"
        )
    computed = {
        "ranks_per_node": ranks if gpus is None else gpus,
        "gpus": gpus is not None,
        "options": tuple(options.slurm or ()),
    }
    values = vars(options) | computed
    resources = _select(Resources, values)
    site = _select(Site, values)
    submit(options.config, resources, site, options.set_ or [], options.dry_run)


def _select[T](kind: type[T], values: dict[str, Any]) -> T:
    """An instance with those of the values that are its fields."""
    return kind(**{one.name: values[one.name] for one in fields(kind)})  # type: ignore[arg-type]


def preflight_command(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML file, the name of a packaged one, or the job.yaml of a run.", metavar="JOB"
        ),
    ],
    set_: Overrides = None,
) -> None:
    """Check hosts, software, run directory, GPUs and links before training. Runs alone, or on all
    ranks by srun or torchrun.
    """
    from cp_ring.tools.slurm import preflight

    raise typer.Exit(preflight.main(config, set_ or []))


def status_command(
    run_dir: Annotated[Path, typer.Argument(help=RUN_DIR, metavar="RUN_DIR")],
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page of the run, one file that needs no network.", **WRITTEN),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="The same as cp-ring watch.")] = False,
) -> None:
    """Show the state of a run: its last step, its newest whole checkpoint, its restarts, and why it
    stopped the last time.
    """
    from cp_ring.tools.slurm.status import show, status

    if html is not None:
        from cp_ring.tools.cli import run_page

        run_page.write(run_dir, html)
        typer.echo(f"wrote {html}", err=as_json)
    if watch:
        follow(run_dir)
        return
    facts = status(run_dir)
    emit(facts, as_json, lambda: typer.echo(show(facts)))


def follow(run_dir: Annotated[Path, typer.Argument(help=RUN_DIR, metavar="RUN_DIR")]) -> None:
    """Show the state and the last steps of a run until it is done, or Ctrl-C."""
    from rich.live import Live

    from cp_ring.tools.slurm.status import status

    with contextlib.suppress(KeyboardInterrupt), Live(refresh_per_second=1) as live:
        while True:
            facts = status(run_dir)
            live.update(state_and_steps(facts, progress.read(run_dir)))
            if facts["state"] == "DONE":
                return
            time.sleep(SECONDS)


def state_and_steps(facts: dict[str, Any], steps: list[dict[str, Any]]) -> Any:
    """What the terminal shows: the state, the last steps, and where the time of the last sampled
    step went.
    """
    from rich.text import Text

    from cp_ring.tools.slurm.status import show

    lines = [show(facts)]
    for step in steps[-5:]:
        loss, rate = step.get("lm loss"), step.get("tokens per second")
        lines.append(
            f"step {step['step']}"
            + (f" | loss {loss:.4f}" if isinstance(loss, float) else "")
            + (f" | {rate:,.0f} tokens/s" if isinstance(rate, float) else "")
        )
    for last in progress.timings(steps)[-1:]:
        slow = ""
        if rank := last.get("slowest_rank"):
            slow = f", slowest rank {rank['rank']} ({rank['host']}) {rank['slower'] - 1:+.0%}"
        waiting = f"{last['exposed_share']:.1%} of attention is waiting"
        lines.append(f"step {last['step']}: {waiting}{slow}")
    return Text("\n".join(lines))
