"""`cp-ring certify`: a table, or JSON, of what the ranks of a job found."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.tools.cli import app
from cp_ring.tools.job import certify_job as module
from cp_ring.tools.job.certify_job import certify
from tests.tools.job.test_train import TINY, command, log_of

FOUND = {
    "about": {"not_covered": ["experts, in the loss"]},
    "seconds": 1.25,
    "probes": [
        {
            "name": "mask",
            "layer": "layer 1",
            "mask": "causal",
            "error": 2.0,
            "bound": 0.0,
            "where": "rank 1",
            "passed": False,
        },
        {
            "name": "out",
            "layer": "layer 1",
            "mask": "causal",
            "error": 1.7e-7,
            "bound": 5e-6,
            "where": "rank 0",
            "passed": True,
        },
    ],
}


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(module, "certify", lambda source, overrides, verbose: (2, FOUND))


def test_table(found):
    done = CliRunner().invoke(app, ["certify", "quickstart"])
    assert done.exit_code == 2
    assert re.search(r"mask .* 2 .* 0 .* FAILED rank 1", done.output)
    assert re.search(r"out .* 1.7e-07 .* 5.0e-06 .* passed", done.output)
    assert "1 of 2 probes passed in 1.2 s; not covered: experts, in the loss" in done.output


def test_json(found):
    done = CliRunner().invoke(app, ["certify", "quickstart", "--json"])
    assert done.exit_code == 2 and json.loads(done.output) == FOUND


def test_needs_ring_attention():
    with pytest.raises(ConfigError, match=r"cp_ring.enabled is false"):
        certify("quickstart", ["cp_ring.enabled=false"])


@pytest.mark.ci
def test_a_job_on_two_ranks(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(" ".join(f"word{i % 50}" for i in range(2000)))
    done = command(
        "certify", tmp_path, TINY | {"megatron.bf16": "true", "megatron.window_size": "40,0"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"mask of gradients .* layer 1 \(window .* passed", done.stdout)
    assert re.search(r"gradient norm .* tiny model of 1 .* passed", done.stdout)
    # the table and the line behind it, and nothing of what the ranks print
    assert done.stdout.startswith("\u250f")
    assert re.search(r"cp_ring: (\d+) of \1 probes passed in \d+\.\d s$", done.stdout.strip())
    assert len(done.stderr.splitlines()) <= 6, done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["logs"]
    assert "hidden_size" in log_of(tmp_path, command="certify")
