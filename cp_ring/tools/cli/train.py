"""`cp-ring train`."""

from __future__ import annotations

from typing import Annotated

import typer


def _list_configurations(wanted: bool) -> None:
    if wanted:
        from cp_ring.tools.cli.tables import print_table
        from cp_ring.tools.job.config import summaries

        print_table(summaries())
        raise typer.Exit


def train_command(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a packaged one (see --list).")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C",
            help="Override a key (the value is read as YAML), or preset=NAME. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command line and stop.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all output of the ranks.")
    ] = False,
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            is_eager=True,
            callback=_list_configurations,
            help="List the packaged configurations.",
        ),
    ] = False,
) -> None:
    """Train the job of a configuration, or resume it, on this machine's GPUs, or on its CPU if it
    has no GPU.
    """
    from cp_ring.tools.job.train import train

    raise typer.Exit(train(config, set_ or [], dry_run, verbose))
