"""The GPU script runs on the CPU, on small shapes, with the same sections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.run import SECTIONS

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "tests/gpu/run.sh"), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=180)


def test_dry_run(tmp_path):
    sections = [name for name in SECTIONS if name not in ("rings", "peers")]
    chosen = [word for name in sections for word in ("--only", name)]
    done = run(str(tmp_path / "out.json"), "--device", "cpu", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(sections) <= set(report)
    assert report["kernels"]["cpu, torch.float32"]["merged backward"] == "holds"
    assert all(max(errors) < 1e-5 for errors in report["accuracy"].values())
    spans = report["launches"]["backward"]["spans"]
    assert {"cp_ring: backward, hop 0", "cp_ring: backward, hop 1", "cp_ring: add gradients"} <= set(spans)
    assert "cp_ring: merge" in report["launches"]["forward"]["spans"]
    assert [result["cp"] for result in report["replays"] if result["mask"] == "causal"] == [1, 2]


@pytest.mark.slow
def test_two_processes_on_one_device(tmp_path):
    done = run(str(tmp_path / "out.json"), "--device", "cpu", "--only", "rings", "--only", "peers")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert all(max(errors) < 1e-5 for errors in report["rings"]["gloo, cpu"].values())
    assert report["peers"][0]["name"] == "cp_ring"
