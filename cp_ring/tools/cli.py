"""The `cp-ring` command. Heavy modules are imported by the command that needs them, so that help is
quick.
"""

from __future__ import annotations

import errno
import logging
import sys
from typing import Annotated

import typer

from cp_ring.errors import ConfigError, KernelError, PlanError, one_line
from cp_ring.tools import bench, plan, tune
from cp_ring.tools.terminal import JobName, Overrides

app = typer.Typer(
    help="Context parallelism for Megatron-core: ring attention planned as data and proven before "
    "it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        import cp_ring

        print(f"cp_ring {cp_ring.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None: ...


@app.command()
def train(
    job: JobName,
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
) -> None:
    """Train or resume the job of a YAML file. It runs on the GPUs of this machine, or on its CPU if
    there are none.
    """
    from cp_ring.tools import train

    raise typer.Exit(train.train(job, set_ or [], dry_run, print_flags))


app.command("plan")(plan.plan_command)
app.command("tune")(tune.tune_command)
app.add_typer(bench.app, name="bench")


@app.command()
def doctor() -> None:
    """Show what is installed and what is wrong. The exit code is 1 if something is wrong."""
    from cp_ring.tools import doctor

    raise typer.Exit(doctor.main())


@app.command()
def flags() -> None:
    """List the flags that cp_ring adds to a script."""
    from cp_ring.megatron.options import Options

    print(Options.help(), end="", flush=True)


def main() -> None:
    """Run the console script: bad input gives one line on stderr and exit code 2, never a
    traceback.
    """
    # without a GPU it warns when it is imported
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        app(prog_name="cp-ring")
    except (ConfigError, PlanError, KernelError) as error:
        for line in map(one_line, error.args):
            print(f"cp_ring: error: {line}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = sys.stderr  # what is left for it cannot be written at the end either
        sys.exit(f"cp_ring: error: the output cannot be written: {error.strerror}")
