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
from cp_ring.tools.cli import bench
from cp_ring.tools.cli.job_commands import (
    certify_command,
    compare_command,
    doctor_command,
    train_command,
)
from cp_ring.tools.cli.option_models import QuietCommand, QuietGroup, command
from cp_ring.tools.cli.plan_command import PlanRequest, run_plan
from cp_ring.tools.cli.slurm_commands import (
    SubmitOptions,
    follow,
    preflight_command,
    run_submit,
    status_command,
)
from cp_ring.tools.cli.terminal import flags_command, patches_command
from cp_ring.tools.cli.trace_command import trace_command
from cp_ring.tools.cli.tune_command import TuneOptions, run_tune

# of click, or of typer's own copy of click; typer does not export it
_USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="cp-ring", cls=QuietGroup, no_args_is_help=True, pretty_exceptions_enable=False
)

SUBMIT = command(SubmitOptions, run_submit)
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run a job": {
        "train": train_command,
        "certify": certify_command,
        "compare": compare_command,
        "submit": SUBMIT,
        "preflight": preflight_command,
    },
    "Look at a run": {"status": status_command, "watch": follow, "trace": trace_command},
    "Plan and measure": {
        "plan": command(PlanRequest, run_plan),
        "tune": command(TuneOptions, run_tune),
    },
    "This installation": {
        "doctor": doctor_command,
        "flags": flags_command,
        "patches": patches_command,
    },
}
for _panel, _commands in _COMMANDS.items():
    for _name, _run in _commands.items():
        app.command(_name, cls=QuietCommand, help=one_line(_run.__doc__), rich_help_panel=_panel)(
            _run
        )
app.add_typer(bench.commands(), name="bench", rich_help_panel="Plan and measure")
slurm = typer.Typer(no_args_is_help=True)  # as they were grouped
slurm.command("submit")(SUBMIT)
slurm.command("status")(status_command)
slurm.command("preflight")(preflight_command)
app.add_typer(slurm, name="slurm", hidden=True)


def _print_versions(wanted: bool) -> None:
    if wanted:
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
