"""Commands of `cp-ring`, run in this process."""

import json
import shlex

from typer.testing import CliRunner

from cp_ring.tools.cli import app


def printed(line):
    """What a command prints; raises what it raises."""
    result = CliRunner().invoke(app, shlex.split(line))
    if result.exception:
        raise result.exception
    return result.stdout


def told(line):
    """The object that it prints for programs."""
    return json.loads(printed(f"{line} --json"))
