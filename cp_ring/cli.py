"""The `cp-ring` command. Heavy modules are imported by the command that needs them, so that help is quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cp_ring.bench.accuracy_command import bench_accuracy
from cp_ring.bench.attention_command import bench_attention
from cp_ring.bench.overlap_command import bench_overlap
from cp_ring.bench.plan import bench_plan
from cp_ring.bench.replay_command import bench_replay
from cp_ring.errors import ConfigError, KernelError, PlanError
from cp_ring.job.certify import certify_command
from cp_ring.job.doctor_command import doctor_command
from cp_ring.job.slurm_command import preflight_command, status_command, submit_command
from cp_ring.plan.command import plan_command

_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer has it from click or from a copy of its own, and exports it from neither

app = typer.Typer(name="cp-ring", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.command("plan")(plan_command)
app.command("certify")(certify_command)
app.command("doctor")(doctor_command)
bench = typer.Typer(no_args_is_help=True, help="Measure cp_ring on this machine.")
bench.command("plan")(bench_plan)
bench.command("attention")(bench_attention)
bench.command("accuracy")(bench_accuracy)
bench.command("replay")(bench_replay)
bench.command("overlap")(bench_overlap)
app.add_typer(bench, name="bench")
app.command("submit")(submit_command)
app.command("status")(status_command)
app.command("preflight")(preflight_command)


@app.callback()
def _about() -> None:
    """Context parallelism for Megatron-core: ring attention planned as data and proven before it runs."""


def _list_configurations(wanted: bool) -> None:
    if wanted:
        from cp_ring.job.config import summaries

        _print_table(summaries())
        raise typer.Exit


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged one (see --list).")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a key (the value is read as YAML), or preset=NAME. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact command line and stop.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_list_configurations, help="List the packaged configurations.")
    ] = False,
) -> None:
    """Train, or resume, the job of a configuration on this machine's GPUs, or on its CPU where there are none."""
    from cp_ring.job.train import train as run_job

    raise typer.Exit(run_job(config, set_ or [], dry_run))


@app.command()
def patches() -> None:
    """List every place where cp_ring changes other code at run time, and its state for the installed versions."""
    from cp_ring.patches import table

    _print_table(table())


def _print_table(rows: list[dict[str, str]]) -> None:
    """Rows of the same keys, in the order of the first one's."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(show_lines=True)
    for column in rows[0]:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*row.values())
    Console().print(shown)


def main() -> None:
    """Entry point of the console script: bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:  # Ctrl-C
        sys.exit("Aborted!")
    except _USAGE_ERROR as error:
        message = error.format_message()
    except (ConfigError, PlanError, KernelError) as error:
        message = str(error)
    if message:  # none with the help that a command without arguments prints
        print(f"cp_ring: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
