"""`cp-ring submit`, `status` and `preflight`, also as `cp-ring slurm submit` and so on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

RESOURCES, RANKS = "What to ask Slurm for", "How ranks are started"  # headings in the help text


def submit_command(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a packaged one (quickstart).")
    ],
    nodes: Annotated[int, typer.Option(rich_help_panel=RESOURCES, help="Nodes.")],
    gpus_per_node: Annotated[
        int | None,
        typer.Option(rich_help_panel=RESOURCES, help="GPUs of each node, with one rank on each."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(rich_help_panel=RESOURCES, help="Ranks of each node, for jobs on the CPU."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="Override a key; the value is read as YAML. Repeatable."
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(rich_help_panel=RESOURCES, help="Slurm partition.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(rich_help_panel=RESOURCES, help="Slurm account.")
    ] = None,
    qos: Annotated[
        str | None, typer.Option(rich_help_panel=RESOURCES, help="Slurm quality of service.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RESOURCES,
            help="Time limit of each attempt: minutes, H:MM:SS or D-HH:MM:SS.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(rich_help_panel=RESOURCES, help="Name of the job.")
    ] = "cp_ring",
    cpus_per_rank: Annotated[
        int | None, typer.Option(rich_help_panel=RESOURCES, help="Cores of each rank.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=RESOURCES,
            metavar="OPTION",
            help="Another sbatch option: --slurm=--exclusive. Repeatable.",
        ),
    ] = None,
    warn_seconds: Annotated[
        int,
        typer.Option(
            rich_help_panel=RESOURCES, help="Save this many seconds before the time limit."
        ),
    ] = 120,
    launcher: Annotated[
        str,
        typer.Option(
            rich_help_panel=RANKS, help="srun starts a task per rank, torchrun a task per node."
        ),
    ] = "srun",
    rank_order: Annotated[
        Path | None,
        typer.Option(rich_help_panel=RANKS, help="File of host names in the order of their ranks."),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(rich_help_panel=RANKS, help="Your site's copy of launch/slurm/env.sh."),
    ] = None,
    container_image: Annotated[
        str | None,
        typer.Option(rich_help_panel=RANKS, help="Run in this image (pyxis and enroot)."),
    ] = None,
    container_mounts: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RANKS, help="SRC:DST,... (the run directory is always mounted)."
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RANKS,
            help="Python of the ranks; default: this one, or the image's python3.",
        ),
    ] = None,
    preflight: Annotated[bool, typer.Option(help="Check nodes and links before training.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and the placement, and stop.")
    ] = False,
) -> None:
    """Submit a job to Slurm. It saves before the time limit, resumes after failures and preemption,
    and stops when it is done.
    """
    from cp_ring.errors import ConfigError
    from cp_ring.tools.slurm.batch_script import Resources
    from cp_ring.tools.slurm.submit import Site, submit

    if (gpus_per_node is None) == (ranks_per_node is None):
        raise ConfigError(
            "cp-ring submit: give either --gpus-per-node or, for a job on the CPU, --ranks-per-node"
        )
    resources = Resources(
        nodes=nodes,
        ranks_per_node=gpus_per_node if gpus_per_node is not None else ranks_per_node or 0,
        gpus=gpus_per_node is not None,
        name=name,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        cpus_per_rank=cpus_per_rank,
        warn_seconds=warn_seconds,
        options=tuple(slurm or ()),
    )
    site = Site(
        launcher,  # type: ignore[arg-type]
        env_file,
        rank_order,
        container_image,
        container_mounts,
        python,
        preflight,
    )
    submit(config, resources, site, set_ or [], dry_run)


def preflight_command(
    config: Annotated[
        str,
        typer.Argument(help="A YAML file, the name of a packaged one, or the job.yaml of a run."),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="Override a key; the value is read as YAML. Repeatable."
        ),
    ] = None,
) -> None:
    """Check hosts, software, run directory, GPUs and links before training. Runs alone, or on all
    ranks by srun or torchrun.
    """
    from cp_ring.tools.slurm.preflight import main

    raise typer.Exit(main(config, set_ or []))


def status_command(
    run_dir: Annotated[Path, typer.Argument(help="The launch.run_dir of the job.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Write a page of the run, one file that needs no network."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the state until the run is done, or Ctrl-C.")
    ] = False,
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
        from cp_ring.tools.cli.watch import follow

        follow(run_dir)
        return
    facts = status(run_dir)
    typer.echo(json.dumps(facts) if as_json else show(facts))
