"""The command lines of `cp-ring submit`, `status` and `preflight`; what they do is imported when they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def submit_command(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged one (quickstart).")],
    nodes: Annotated[int, typer.Option(help="Nodes.")],
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each node; one rank on each.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="For jobs on the CPU: ranks of each node.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key; the value is read as YAML. Repeatable.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm quality of service.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of each try: minutes, H:MM:SS or D-HH:MM:SS.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "cp_ring",
    cpus_per_rank: Annotated[int | None, typer.Option(help="Cores of each rank.")] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(metavar="--OPTION=VALUE", help="A further sbatch option: --slurm=--exclusive."),
    ] = None,
    warn_seconds: Annotated[int, typer.Option(help="Ranks save so many seconds before the time limit.")] = 120,
    launcher: Annotated[str, typer.Option(help="srun: a task per rank; torchrun: a task per node.")] = "srun",
    rank_order: Annotated[Path | None, typer.Option(help="File of host names in the order of their ranks.")] = None,
    env_file: Annotated[Path | None, typer.Option(help="Your site's copy of launch/slurm/env.sh.")] = None,
    container_image: Annotated[str | None, typer.Option(help="Run in this image (pyxis and enroot).")] = None,
    container_mounts: Annotated[str | None, typer.Option(help="SRC:DST[,SRC:DST...]; the run directory is always there.")] = None,
    python: Annotated[str | None, typer.Option(help="Python of the ranks; default: this one, or python3 of the image.")] = None,
    preflight: Annotated[bool, typer.Option(help="Check nodes and links before training.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and the placement, and stop.")] = False,
) -> None:
    """Submit a job to Slurm: it saves before the time limit, resumes after failures and preemption, and stops when done."""
    from cp_ring.errors import ConfigError
    from cp_ring.slurm.batch_script import Resources
    from cp_ring.slurm.submit import Site, submit

    if (gpus_per_node is None) == (ranks_per_node is None):
        raise ConfigError("cp-ring submit: give either --gpus-per-node or, for a job on the CPU, --ranks-per-node")
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
    site = Site(launcher, env_file, rank_order, container_image, container_mounts, python, preflight)  # type: ignore[arg-type]
    submit(config, resources, site, set_ or [], dry_run)


def preflight_command(
    config: Annotated[str, typer.Argument(help="A YAML file, the name of a packaged one, or the job.yaml of a run.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key; the value is read as YAML. Repeatable.")
    ] = None,
) -> None:
    """Check hosts, software, run directory, GPUs and links before training: alone, or on all ranks by srun or torchrun."""
    from cp_ring.slurm.preflight import main

    raise typer.Exit(main(config, set_ or []))


def status_command(
    run_dir: Annotated[Path, typer.Argument(help="The launch.run_dir of the job.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show where a run stands: state, last step, newest whole checkpoint, restarts, why it last stopped."""
    from cp_ring.slurm.status import show, status

    facts = status(run_dir)
    typer.echo(json.dumps(facts) if as_json else show(facts))
