"""`cp-ring bench nodes`: what crosses the nodes is what the plans say, and only that goes over the
slow link.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.testing import network as links
from cp_ring.tools.bench import two_nodes as nodes
from cp_ring.tools.bench.contestants import Contest
from cp_ring.tools.cli import app
from tests import needs


@pytest.mark.slow
def test_bytes_between_nodes_and_the_slow_link():
    needs.programs("ip", "tc", "nsenter")
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.count("\n")
    try:
        direct, relay, heads = nodes.run(Contest(512, 4, 4, 64), 1, 0.05, full=True)
    except links.NoNamespacesError as error:
        pytest.skip(str(error))
    assert [found["shape"] for found in (direct, relay, heads)] == ["direct", "relay", "heads 2"]
    for found in (direct, relay, heads):
        assert found["bytes_between_nodes"] == found["planned_bytes_between_nodes"] > 0
    assert (
        direct["bytes_between_nodes"]
        == 2 * relay["bytes_between_nodes"]
        == 2 * heads["bytes_between_nodes"]
    )
    # All of it passes through the link, in both directions at once.
    for found in (direct, relay, heads):
        assert found["median_s"] > 0.9 * found["bytes_between_nodes"] / 2 / found["bytes_per_s"]
    assert (
        subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.count("\n")
        == before
    )


def test_without_root_it_says_why(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links.shutil, "which", lambda tool: tool)
    found = CliRunner().invoke(app, ["bench", "nodes", "--json"])
    reason = "a throttled link needs root, to make network namespaces"
    assert json.loads(found.stdout)["rows"] == [{"skipped": reason}]
    assert (
        "not measured: a throttled link needs root"
        in CliRunner().invoke(app, ["bench", "nodes"]).stdout
    )


@pytest.mark.parametrize("line", [["--seq-length", "12"], ["--heads", "3"], ["--share", "0"]])
def test_bad_sizes(line):
    error = CliRunner().invoke(app, ["bench", "nodes", *line]).exception
    assert isinstance(error, ConfigError)
    assert line[0] in str(error)
