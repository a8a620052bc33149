"""The driver of the GPU checks: a step that fails, crashes or hangs loses only itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import run, step
from tests.gpu.job import Job


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def python(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", source]


@pytest.mark.parametrize(
    ("source", "limit", "state", "says"),
    [
        ("", 60, "passed", None),
        ("print('wrong'); raise SystemExit(1)", 60, "failed", "wrong"),
        ("import os; print('last words', flush=True); os.abort()", 60, "crashed", "last words"),
        ("import time; print('waits', flush=True); time.sleep(600)", 0.5, "timed out", ""),
    ],
)
def test_a_step_loses_only_itself(tmp_path, source, limit, state, says):
    """Each outcome is one more line of results, and the lines before it stay."""
    out, log = tmp_path / "results.jsonl", tmp_path / "results.log"
    run.append(out, step="a", before=True)
    assert run.run_step("a", python(source), limit, out, log) is (state == "passed")
    first, ended = lines(out)
    assert first == {"step": "a", "before": True}
    assert (ended["step"], ended["state"], ended["holds"]) == ("a", state, state == "passed")
    assert says is None or says in ended["output"]


def test_a_step_ends_with_the_processes_that_it_started(tmp_path):
    """Ranks that a hung step started would otherwise hold the GPU's memory."""
    pid = tmp_path / "pid"
    child = (
        f"import subprocess, sys, time; x = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, "
        "'w').write(str(x.pid))"
    )
    run.run_step("a", python(child), 60, tmp_path / "out", tmp_path / "log")
    assert not alive(int(pid.read_text()))


def alive(pid: int) -> bool:
    """A killed process of an init that does not reap stays as a zombie."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True


def test_no_step_starts_without_time(tmp_path, monkeypatch):
    out = tmp_path / "results.jsonl"
    monkeypatch.setattr(
        sys,
        "argv",
        ["run", "--out", str(out), "--only", "a", "c", "--seconds", "0"],
    )
    facts = subprocess.CompletedProcess([], 0, stdout='{"device": "cuda"}')
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: facts)
    assert run.main() == 1
    assert [line.get("state") for line in lines(out)] == [
        None,
        *["not started: no time left"] * 2,
        None,
    ]
    assert lines(out)[-1] == {"holds": False}


@pytest.mark.parametrize(
    ("value", "failed"),
    [(0.5, False), (1.0, False), (1.1, True), (math.nan, True), (math.inf, True)],
)
def test_a_check_holds_up_to_its_limit(tmp_path, value, failed):
    job = Job("a", "cuda", str(tmp_path / "out"))
    job.check("something", value, 1.0, where="here")
    assert job.failed is failed
    (line,) = lines(tmp_path / "out")
    assert line["holds"] is not failed
    assert (line["check"], line["limit"], line["where"]) == ("something", 1.0, "here")


def test_an_error_of_a_step_is_a_line(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("tests.gpu.rings.accuracy", broken)
    out = tmp_path / "out"
    assert not step.run("b", "cuda", str(out))
    (line,) = lines(out)
    assert line["holds"] is False
    assert "an illegal memory access" in line["error"]
