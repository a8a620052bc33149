"""`cp-ring bench timing-cost`. Its times are those of the machine; a test asserts only that they
are there.
"""

import json
import shlex

from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.tools.cli import app


def test_command_gives_both_costs():
    result = CliRunner().invoke(
        app, shlex.split("bench timing-cost --tokens 64 --repeats 2 --json")
    )
    assert result.exit_code == 0, result.exception
    recorded, not_recorded = json.loads(result.stdout)["results"]
    assert (recorded["what"], not_recorded["what"]) == ("recorded", "not recorded")
    assert recorded["call_ms"] > 0 and -1 < recorded["cost"] < 100
    assert not_recorded["marks"] == 40 and 0 < not_recorded["cost"] < 10


def test_an_odd_number_of_tokens_is_one_line():
    error = CliRunner().invoke(app, ["bench", "timing-cost", "--tokens", "9"]).exception
    assert isinstance(error, ConfigError) and "--tokens 9" in str(error)
