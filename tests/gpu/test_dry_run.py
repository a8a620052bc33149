"""The steps of the GPU checks run on the CPU, on small shapes with emulated libraries; a step that
fails loses only itself.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import emulated, graphs, run, step, training
from tests.gpu.job import Job

ROOT = Path(__file__).parents[2]


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
        ["run", "--device", "cpu", "--out", str(out), "--only", "a", "k", "--seconds", "0"],
    )
    facts = subprocess.CompletedProcess([], 0, stdout='{"device": "cpu"}')
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
    job = Job("a", "cpu", str(tmp_path / "out"))
    job.check("something", value, 1.0, where="here")
    assert job.failed is failed
    (line,) = lines(tmp_path / "out")
    assert line["holds"] is not failed
    assert (line["check"], line["limit"], line["where"]) == ("something", 1.0, "here")


def test_tiles(tmp_path):
    out = tmp_path / "out"
    assert step.run("a", "cpu", str(out)), out.read_text()
    checks = [line for line in lines(out) if "check" in line]
    assert {line["kernel"] for line in checks} == {
        "transformer_engine", "transformer_engine, thd", "flash", "flash_aten", "efficient", "cpu"
    }  # fmt: skip
    assert {line["check"] for line in checks} == {
        "out", "lse", "dq, merged lse", "dk, merged lse", "dv, merged lse",
        "draws from the default generator"
    }  # fmt: skip
    assert {line["tile"] for line in checks} == {
        "256 x 128",
        "128 x 256",
        "causal 184 x 184",
        "72 x 184",
    }


def test_one_key_too_few_fails_on_tiles(tmp_path, monkeypatch):
    """The limits of the checks are tight enough for the smallest fault."""
    forward = emulated._flash_forward

    def without_last_key(q, k, v, cu_q, cu_k, max_q, max_k, *rest, **options):
        if cu_q is None:
            k, v, max_k = k[:, :-1], v[:, :-1], max_k - 1
        return forward(q, k, v, cu_q, cu_k, max_q, max_k, *rest, **options)

    monkeypatch.setattr(emulated, "_flash_forward", without_last_key)
    out = tmp_path / "out"
    assert not step.run("a", "cpu", str(out))
    wrong = {(line["kernel"], line["check"]) for line in lines(out) if line.get("holds") is False}
    assert ("flash_aten", "out") in wrong
    assert {kernel for kernel, _ in wrong} == {"flash_aten"}


def test_an_error_of_a_step_is_a_line(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("tests.gpu.rings.accuracy", broken)
    out = tmp_path / "out"
    assert not step.run("d", "cpu", str(out))
    (line,) = lines(out)
    assert line["holds"] is False
    assert "an illegal memory access" in line["error"]


def test_same_bits_are_wanted_of_deterministic_kernels_alone(tmp_path, monkeypatch):
    """The fastest kernels add gradients up in any order, so two runs of them differ on a GPU."""
    asked = []

    monkeypatch.setattr(
        training,
        "_train",
        lambda job, cp, flags: asked.append("--deterministic-mode" in flags) or [1.0],
    )
    assert step.run("h", "cpu", str(tmp_path / "out"))
    assert asked == [True, True]


@pytest.mark.slow
def test_profiles(tmp_path):
    out = tmp_path / "out"
    assert step.run("c", "cpu", str(out)), out.read_text()
    found = {(line["pass"], line["rank"]): line for line in lines(out) if "spans" in line}
    assert {rank for _, rank in found} == {0, 3, 7}
    assert {"cp_ring: forward, hop 0", "cp_ring: forward, hop 1"} <= set(
        found["forward", 3]["spans"]
    )
    assert {"cp_ring: backward, hop 0", "cp_ring: backward, hop 1"} <= set(
        found["backward", 3]["spans"]
    )
    assert all(line["host_us_a_hop"] > 0 and line["device_s"] for line in found.values())


def test_graphs(tmp_path):
    """Without CUDA the operations are recorded and repeated, which takes the same checks."""
    job = Job("m", "cpu", str(tmp_path / "out"))
    for exact in (False, True):
        graphs.compare(job, "cpu", exact)
    found = lines(tmp_path / "out")
    assert len(found) == 10 and not job.failed
    assert all(line["graph_over_call"] > 0 for line in found if "graph_over_call" in line)


@pytest.mark.slow
def test_every_step(tmp_path):
    """The whole dry run, as on a machine with a GPU; about 4 minutes on 2 cores."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "OUT": str(tmp_path),
    }
    command = [str(ROOT / "tests/gpu/run.sh"), "--device", "cpu"]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * run.HANGING_S,
    )
    out = tmp_path / "results.jsonl"
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()[-4000:]
    found = lines(out)
    ended = {line["step"]: line["state"] for line in found if "state" in line}
    assert ended == dict.fromkeys(run.STEPS, "passed")
    assert found[-1] == {"holds": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "results.log"]
    replays = [line for line in found if "slowest_of" in line]
    assert {line["mask"] for line in replays} == {"causal", "documents", "window"}
    assert any("probes passed" in text for line in found for text in line.get("certificate", []))
