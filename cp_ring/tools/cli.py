"""The `cp-ring` command. Heavy modules are imported by the command that needs them, so that help is
quick.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
from typing import Annotated, Any

import typer

from cp_ring.errors import ConfigError, KernelError, PlanError, one_line
from cp_ring.tools import bench, plan, tune
from cp_ring.tools.terminal import JOB, Overrides

# of click, or of typer's own copy of click; typer does not export it
_USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="cp-ring",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def train(
    job: Annotated[str, typer.Argument(help=JOB, metavar="JOB")],
    set_: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the job, print its command line, and stop.")
    ] = False,
    print_flags: Annotated[
        bool,
        typer.Option(
            "--print-flags",
            help="Prepare the job, print the command line that runs it by hand, a flag a line.",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="With --print-flags: of one rank of so many, for Slurm."),
    ] = None,
) -> None:
    """Train or resume the job of a YAML file. On this machine: on GPUs, or on the CPU if there are
    none.
    """
    from cp_ring.tools import train

    if print_flags:
        with contextlib.redirect_stdout(sys.stderr):  # so that stdout holds the command line alone
            line = train.line_by_hand(job, set_ or [], ranks)
        print(line)
        return
    if ranks is not None:
        raise ConfigError("--ranks needs --print-flags: sbatch launch/slurm/train.sbatch uses both")
    raise typer.Exit(train.train(job, set_ or [], dry_run))


for _name, _run in (("plan", plan.plan_command), ("tune", tune.tune_command)):
    app.command(_name, help=one_line(_run.__doc__))(_run)
app.add_typer(bench.app, name="bench")


@app.command()
def doctor() -> None:
    """Show what is installed and what is wrong. Versions, devices, kernels, patches; the exit code
    is 1 for a problem.
    """
    from cp_ring.tools import doctor

    raise typer.Exit(doctor.main())


@app.command()
def flags() -> None:
    """List the flags that cp_ring adds to a script."""
    from cp_ring.megatron.options import Options

    print(Options.help(), end="")


@app.command()
def patches() -> None:
    """List where cp_ring changes other code. With its state for the installed versions."""
    from cp_ring.patches import table

    for patch in table():
        print(f"{patch.pop('name')}: {patch.pop('state')}")
        for text in filter(None, patch.values()):
            print(textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    "))


def _print_versions(switched_on: bool) -> None:
    if switched_on:
        from cp_ring.tools.doctor import version_of

        typer.echo(f"cp-ring {version_of('cp-ring') or 'of a source'}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_versions,
            help="Print the version and stop.",
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
        if type(error).__name__ == "NoArgsIsHelpError":  # cp-ring, or cp-ring bench, alone
            sys.exit(error.format_message())
        reasons = [error.format_message()]
    except (ConfigError, PlanError, KernelError) as error:
        reasons = [*error.args]
    for line in filter(None, map(one_line, reasons)):  # none after help for want of arguments
        print(f"cp_ring: error: {line}", file=sys.stderr)
    sys.exit(2)
