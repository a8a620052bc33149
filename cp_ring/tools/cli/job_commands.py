"""The command of jobs: `cp-ring train`."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_ring.tools.cli.option_models import Job, Overrides, Verbose
from cp_ring.tools.cli.terminal import print_entries, stdout_to


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
    print_flags: Annotated[
        bool,
        typer.Option(
            "--print-flags",
            help="Prepare the job, print the command line that starts it by hand, and stop.",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="With --print-flags: of one rank of so many, which Slurm starts."),
    ] = None,
    verbose: Verbose = False,
    list_: Annotated[bool, _LIST] = False,
    again: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train the job of a configuration, or resume it, on this machine's GPUs, or on its CPU if it
    has no GPU.
    """
    from cp_ring.tools.job import train

    if print_flags:
        with stdout_to(2):
            line = train.line_by_hand(config, set_ or [], ranks)
        typer.echo(line)
        return
    raise typer.Exit(train.train(config, set_ or [], dry_run, verbose, again))
