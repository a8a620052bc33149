"""`cp-ring submit`, `status` and `preflight`, also as `cp-ring slurm submit` and so on."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_ring.tools.cli.option_models import (
    JOB,
    SET,
    WRITTEN,
    AsJson,
    Overrides,
    argument,
    option,
)

_RESOURCES: dict[str, Any] = {"rich_help_panel": "What to ask Slurm for"}
_RANKS: dict[str, Any] = {"rich_help_panel": "How ranks are started"}
SECONDS = 2.0
"""Between two looks of `watch`."""
RUN_DIR = "The launch.run_dir of a job, or the --cp-ring-run-dir of a script."


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The options of `cp-ring submit`."""

    config: str = argument(JOB, MISSING, metavar="JOB")
    nodes: int = option(MISSING, "Nodes.", **_RESOURCES)
    gpus_per_node: int | None = option(
        None, "GPUs of each node, with one rank on each.", **_RESOURCES
    )
    ranks_per_node: int | None = option(
        None, "Ranks of each node, for jobs on the CPU.", **_RESOURCES
    )
    set_: list[str] | None = option(None, SET, "--set", metavar="A.B=C")
    partition: str | None = option(None, "Slurm partition.", **_RESOURCES)
    account: str | None = option(None, "Slurm account.", **_RESOURCES)
    qos: str | None = option(None, "Slurm quality of service.", **_RESOURCES)
    time: str | None = option(
        None, "Time limit of each attempt: minutes, H:MM:SS or D-HH:MM:SS.", **_RESOURCES
    )
    name: str = option("cp_ring", "Name of the job.", **_RESOURCES)
    cpus_per_rank: int | None = option(None, "Cores of each rank.", **_RESOURCES)
    slurm: list[str] | None = option(
        None,
        "Another sbatch option: --slurm=--exclusive. Repeatable.",
        metavar="OPTION",
        **_RESOURCES,
    )
    warn_seconds: int = option(120, "Save this many seconds before the time limit.", **_RESOURCES)
    launcher: str = option(
        "srun", "srun starts a task per rank, torchrun a task per node.", **_RANKS
    )
    rank_order: Path | None = option(
        None, "File of host names in the order of their ranks.", **_RANKS
    )
    env_file: Path | None = option(None, "Your site's copy of launch/slurm/env.sh.", **_RANKS)
    container_image: str | None = option(None, "Run in this image (pyxis and enroot).", **_RANKS)
    container_mounts: str | None = option(
        None, "SRC:DST,... (the run directory is always mounted).", **_RANKS
    )
    python: str | None = option(
        None, "Python of the ranks; default: this one, or the image's python3.", **_RANKS
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
    from cp_ring.tools.slurm.preflight import main

    raise typer.Exit(main(config, set_ or []))


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
    typer.echo(json.dumps(facts) if as_json else show(facts))


def follow(run_dir: Annotated[Path, typer.Argument(help=RUN_DIR, metavar="RUN_DIR")]) -> None:
    """Show the state and the last steps of a run until it is done, or Ctrl-C."""
    from rich.live import Live

    from cp_ring.observe import progress
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
        rate = step.get("tokens per second")
        loss = step.get("lm loss")
        lines.append(
            f"step {step['step']}"
            + (f" | loss {loss:.4f}" if isinstance(loss, float) else "")
            + (f" | {rate:,.0f} tokens/s" if isinstance(rate, float) else "")
        )
    times = [step["timing"] for step in steps if isinstance(step.get("timing"), dict)]
    if times:
        last = times[-1]
        rank = times[-1].get("slowest_rank")
        slow = ""
        if rank:
            slow = f", slowest rank {rank['rank']} ({rank['host']}) {rank['slower'] - 1:+.0%}"
        waiting = f"{last['exposed_share']:.1%} of attention is waiting"
        lines.append(f"step {last['step']}: {waiting}{slow}")
    return Text("\n".join(lines))
