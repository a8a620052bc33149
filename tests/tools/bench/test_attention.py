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
    contestants = ["cp_ring", "cp_ring_one_rank_one_call"]
    options = [word for name in contestants for word in ("--only", name)]
    found = json.loads(CliRunner().invoke(app, [*LINE, *options, "--json"]).stdout)
    assert [result["name"] for result in found["rows"]] == contestants
    for result in found["rows"]:
        assert result["error"] < 1e-6
        assert 0 < result["min_s"] <= result["median_s"] <= result["max_s"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--only", "warp"], "--only warp: no such contestant"),
        (
            ["--only", "torch_context_parallel"],
            "--only torch_context_parallel: it does not run with --device cpu",
        ),
        (
            ["--device", "cuda", "--cp", "2"],
            "--device cuda: --cp 2 ranks need a CUDA device each, there are 0",
        ),
        (["--device", "tpu"], "--device tpu: it is cpu or cuda"),
        (["--device", "gpu"], "--device gpu: it is cpu or cuda"),
        (["--dtype", "int8"], "--dtype int8: it is float32 or bfloat16 or float16"),
        (["--cp", "3"], "--seq-length 256 does not divide by 2 * --cp 3"),
    ],
)
def test_bad_options(options, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = CliRunner().invoke(app, [*LINE, *options]).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)
