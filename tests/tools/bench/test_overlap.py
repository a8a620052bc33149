"""`cp-ring bench overlap`: what it measures is measured on the link that it says, and it leaves
nothing behind.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.testing import network as links
from cp_ring.tools.bench import overlap
from cp_ring.tools.bench.contestants import Contest
from cp_ring.tools.cli import app
from tests import needs


def test_a_throttled_wire_is_as_slow_as_it_says(monkeypatch):
    """Seconds of the wire are set by the compute that was measured; here it is said to be 0.2 s a
    hop.
    """
    needs.programs("ip", "tc", "nsenter")
    monkeypatch.setattr(overlap, "hop_seconds", _a_fifth)
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.count("\n")
    try:
        free, slow = overlap.run(Contest(2048, 2, 4, 64), [0.9], 1)
    except links.NoNamespacesError as error:
        pytest.skip(str(error))
    assert (free["name"], slow["name"]) == ("cp_ring_free_wire", "cp_ring")
    assert slow["bytes_per_s"] == pytest.approx(2 * 1024 * 4 * 64 * 4 / 0.18)
    assert 0.9 * 0.18 < slow["transfer_s"] < 3 * 0.18
    assert free["transfer_s"] < 0.5 * slow["transfer_s"]
    # Keys travel in forward and in backward, and there is not that much to compute: the slow wire
    # must show.
    assert slow["median_s"] > 2 * 0.9 * 0.18
    assert slow["exposed"] == slow["median_s"] / free["median_s"] - 1
    assert (
        subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout.count("\n")
        == before
    )


def _a_fifth(group, setting, repeats):
    return 0.2


def test_without_root_it_says_why(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links.shutil, "which", lambda tool: tool)
    found = CliRunner().invoke(app, ["bench", "overlap", "--json"])
    assert json.loads(found.stdout)["rows"] == [
        {"skipped": "a throttled link needs root, to make network namespaces"}
    ]
    assert (
        "not measured: a throttled link needs root"
        in CliRunner().invoke(app, ["bench", "overlap"]).stdout
    )
    monkeypatch.setattr(links.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "needs tc, not found" in CliRunner().invoke(app, ["bench", "overlap", "--json"]).stdout


@pytest.mark.parametrize("line", [["--seq-length", "6"], ["--ratio", "0"]])
def test_bad_sizes(line):
    error = CliRunner().invoke(app, ["bench", "overlap", *line]).exception
    assert isinstance(error, ConfigError)
    assert line[0] in str(error)
