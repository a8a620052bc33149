"""Without Slurm: launch.max_restarts starts the ranks again when one is lost, and they resume by themselves."""

import signal
import subprocess
import sys
import time

import psutil
import yaml

from cp_ring.observe import progress
from tests.megatron.launch import environment
from tests.slurm.job import TINY

SETTINGS = ("parallel.context_parallel_size=2", "megatron.save_interval=20", "megatron.train_iters=60", "launch.max_restarts=1")


def until(happened, timeout_s=200):
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def ranks(launcher):
    lines = [(process, process.cmdline()) for process in psutil.Process(launcher.pid).children(recursive=True)]
    return [process for process, line in lines if "cp_ring.pretrain_gpt" in line]


def test_killed_rank_is_started_again_and_resumes(tmp_path):
    path, run_dir = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(run_dir)}}))
    line = [sys.executable, "-m", "cp_ring.cli", "train", str(path), *(word for one in SETTINGS for word in ("--set", one))]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(line, env=environment(), stdout=log, stderr=log)
        try:
            until(lambda: launcher.poll() is not None or len(progress.read(run_dir)) >= 25)
            first = ranks(launcher)
            assert len(first) == 2, (tmp_path / "log").read_text()[-3000:]
            first[0].send_signal(signal.SIGKILL)
            assert launcher.wait(timeout=200) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            launcher.kill()
    assert not [process for process in first if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    lines = progress.read(run_dir)
    numbers = [step["step"] for step in lines]
    again = next(i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1])
    assert numbers[again] % 20 == 1 and numbers[again] > 20, "it went on behind the last checkpoint"
    losses = {}
    for step in lines:  # what was done twice had the same loss twice
        assert abs(losses.setdefault(step["step"], step["lm loss"]) - step["lm loss"]) <= 1e-6
    assert sorted(losses) == list(range(1, 61)) and (run_dir / "DONE").read_text() == "60\n"
