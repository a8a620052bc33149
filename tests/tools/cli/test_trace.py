"""`cp-ring trace`: the summary and the picture of a trace."""

import json

import pytest
import torch
from typer.testing import CliRunner

from cp_ring.errors import ConfigError
from cp_ring.observe import trace
from cp_ring.tools.cli import app
from cp_ring.tools.cli.trace_command import measured_bars, predicted_bars
from tests.observe.virtual_time import LINK_S, PAIR_S, VirtualRing


@pytest.fixture
def file(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    ring = VirtualRing(4, lambda rank: 1.0 + (rank == 2), lambda *_: 1.0, monkeypatch)
    trace.write(
        tmp_path / "trace.json", {0: ring.sample(0, calls=2, schedule="ring", kernels=True)}, 0.0
    )
    return tmp_path / "trace.json"


def run(*words):
    result = CliRunner().invoke(app, ["trace", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_summary(file):
    facts = json.loads(run(file, "--json"))
    assert facts["steps"] == [0] and facts["messages"] == sum(
        2 for _ in range(4) for _ in range(3 + 3 + 3)
    )
    compute = {each["rank"]: each["compute_ms"] for each in facts["ranks"]}
    assert (
        compute[2] == pytest.approx(2 * compute[0])
        and [each["calls"] for each in facts["ranks"]] == [4] * 4
    )
    (hop,) = [each for each in facts["hops"] if (each["direction"], each["hop"]) == ("forward", 2)]
    assert hop["compute_ms"] == pytest.approx(2 * 512 * PAIR_S * 1.25 * 1e3, rel=1e-3)
    assert facts["longest_waits"][0]["wait_ms"] > 0
    assert "longest waits" in run(file)


def test_picture(file, tmp_path):
    picture = tmp_path / "call.png"
    assert "wrote" in run(file, "--draw", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="--call 2: the trace has 2 forward calls"):
        run(file, "--draw", picture, "--call", 2)


def test_prediction_is_the_measured_call_where_all_ranks_are_alike(tmp_path, monkeypatch):
    ring = VirtualRing(4, lambda _: 1.0, lambda *_: 1.0, monkeypatch)
    trace.write(tmp_path / "t.json", {0: ring.sample(0, calls=1, schedule="ring")}, 0.0)
    bars, work, sizes = measured_bars(trace.read(tmp_path / "t.json"), 0)
    predicted = predicted_bars(work, dict.fromkeys(sizes, 1), PAIR_S * 1e3, LINK_S * 1e3)
    ends = [
        [(bar.begin, bar.end) for bar in each if (bar.kind, bar.rank, bar.hop) == ("compute", 1, 1)]
        for each in (bars, predicted)
    ]
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-3)
