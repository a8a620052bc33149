"""`cp-ring bench rates`. Its rates are those of the machine; a test asserts that they are there and
that a plan takes them.
"""

import json
import shlex

from typer.testing import CliRunner

from cp_ring.tools.bench import machine
from cp_ring.tools.cli import app


def test_command_gives_rates_that_a_plan_takes(monkeypatch):
    monkeypatch.setattr(machine, "_link", lambda *_: 1.25)
    result = CliRunner().invoke(app, shlex.split("bench rates --megabytes 1 --repeats 1"))
    assert result.exit_code == 0, result.exception
    *_, line = result.stdout.splitlines()
    words = line.removeprefix("cp-ring ").removesuffix(" ...").split()
    assert words[0] == "plan" and words[-2:] == ["--node-bandwidth", "1.25"]
    planned = CliRunner().invoke(app, [*words, "--cp", "4", "--seq-length", "1024", "--json"])
    assert planned.exit_code == 0 and json.loads(planned.stdout)["predicted"]["forward_s"] > 0


def test_a_link_is_measured_between_two_ranks(pool):
    assert all(seconds > 0 for seconds in pool.run(machine.exchange_seconds, 2, 1, 1))
