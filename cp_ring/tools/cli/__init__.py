"""The `cp-ring` command. Heavy modules are imported by the command that needs them, so that help is
quick.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cp_ring.errors import ConfigError, KernelError, PlanError, one_line
from cp_ring.tools import bench
from cp_ring.tools.cli import job_commands, terminal
from cp_ring.tools.cli.option_models import QuietCommand, QuietGroup, command
from cp_ring.tools.cli.plan_command import run_plan
from cp_ring.tools.cli.plan_options import PlanRequest
from cp_ring.tools.cli.tune_command import TuneOptions, run_tune

# of click, or of typer's own copy of click; typer does not export it
_USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="cp-ring", cls=QuietGroup, no_args_is_help=True, pretty_exceptions_enable=False
)

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run a job": {
        "train": job_commands.train_command,
    },
    "Plan and measure": {
        "plan": command(PlanRequest, run_plan),
        "tune": command(TuneOptions, run_tune),
    },
    "This installation": {
        "doctor": terminal.doctor_command,
        "flags": terminal.flags_command,
        "patches": terminal.patches_command,
    },
}
for _panel, _commands in _COMMANDS.items():
    for _name, _run in _commands.items():
        app.command(_name, cls=QuietCommand, help=one_line(_run.__doc__), rich_help_panel=_panel)(
            _run
        )
app.add_typer(bench.app, name="bench", rich_help_panel="Plan and measure")


def _print_versions(switched_on: bool) -> None:
    if switched_on:
        from cp_ring.tools.job.doctor import version_of

        typer.echo(
            ", ".join(
                f"{name} {version_of(name) or 'not installed'}"
                for name in ("cp-ring", "torch", "megatron-core")
            )
        )
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_versions,
            help="Print versions and stop.",
        ),
    ] = False,
) -> None:
    """Context parallelism for Megatron-core: ring attention planned as data and proven before it
    runs.
    """


def main() -> None:
    """Entry point of the console script: bad input is one line on stderr and exit code 2, never a
    traceback.
    """
    # without a GPU it warns when it is imported
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        sys.exit(app(prog_name="cp-ring", standalone_mode=False))
    except typer.Abort:  # Ctrl-C
        sys.exit("Aborted!")
    except _USAGE_ERROR as error:
        reasons = [error.format_message()]
    except (ConfigError, PlanError, KernelError) as error:
        reasons = [*error.args]
    for line in filter(None, map(one_line, reasons)):  # none after help for want of arguments
        print(f"cp_ring: error: {line}", file=sys.stderr)
    sys.exit(2)
