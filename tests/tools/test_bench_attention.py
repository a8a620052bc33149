"""`cp-ring bench attention` and `host`: one small round, and what they reject."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.kernels import REGISTRY
from cp_ring.tools.cli import app

LINE = shlex.split("bench attention --seq-length 256 --heads 2 --head-dim 16 --repeats 2")


def test_a_small_round():
    rows = json.loads(CliRunner().invoke(app, [*LINE, "--json"]).stdout)["rows"]
    assert [row["name"] for row in rows][:2] == ["cp_ring", "one_call"]
    assert all(0 < row["min_s"] <= row["median_s"] for row in rows)


def test_a_length_that_does_not_divide():
    error = CliRunner().invoke(app, [*LINE, "--cp", "3"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "--seq-length 256: give a multiple of 2 * --cp = 6"


@pytest.mark.slow
def test_the_host_has_a_row_for_each_pass():
    result = CliRunner().invoke(app, ["bench", "host", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)["rows"]
    names = [(row["pass"], row["cp"]) for row in rows]
    assert names == [(name, cp) for cp in (8, 1) for name in ("forward", "backward")]
    assert all(0 < row["hop_us"] < 1e6 for row in rows) and "nothing" not in REGISTRY
