"""`cp-ring bench attention`: one small round, and what it rejects."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.tools.cli import app

LINE = shlex.split("bench attention --seq-length 256 --heads 2 --head-dim 16 --repeats 2")


def test_a_small_round():
    options = ["--only", "cp_ring", "--only", "one_call", "--json"]
    found = json.loads(CliRunner().invoke(app, [*LINE, *options]).stdout)
    assert [result["name"] for result in found["rows"]] == ["cp_ring", "one_call"]
    for result in found["rows"]:
        assert result["error"] < 1e-6
        assert 0 < result["min_s"] <= result["median_s"] <= result["max_s"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "warp"], "--only warp: installed for cpu are cp_ring, one_call"),
        (["--device", "cuda"], "--device cuda: there is no CUDA device"),
        (["--device", "tpu"], "--device tpu: unknown; known are cpu, cuda"),
        (["--cp", "3"], "--seq-length 256 does not divide by 2 * --cp 3"),
    ],
)
def test_bad_options(options, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = CliRunner().invoke(app, [*LINE, *options]).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)
