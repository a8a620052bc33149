"""`cp-ring bench host` on the CPU. Its times are those of the machine; a test asserts only that
they are there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.tools import bench_host as host
from cp_ring.tools.cli import app


@pytest.mark.slow
def test_command_gives_a_row_for_each_pass_and_version(monkeypatch):
    monkeypatch.setattr(host, "_ROUNDS", 1)
    checkout = str(Path(__file__).parents[2])
    result = CliRunner().invoke(
        app, ["bench", "host", "--repeats", "1", "--against", checkout, "--json"]
    )
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)["rows"]
    assert {(row["pass"], row["cp_ring"]) for row in rows} == {
        (name, version)
        for name in ("forward", "backward")
        for version in ("this version", checkout)
    }
    assert all(0 < row["hop_us"] < 1e6 for row in rows)


def test_a_folder_without_cp_ring_is_one_line(tmp_path):
    error = CliRunner().invoke(app, ["bench", "host", "--against", str(tmp_path)]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"--against {tmp_path}: there is no cp_ring/__init__.py in it"
