"""Jobs without Slurm, disturbed on purpose.

Ctrl-C: the first one saves and ends the job as SIGTERM does, the second one ends it at once. Where
launch.max_restarts allows it, the ranks start again when one is lost, and they resume by
themselves.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

from cp_ring.observe import progress
from cp_ring.testing.rank_pool import LIMIT_S
from cp_ring.tools.job.launch import _environment, _Interrupts
from tests.megatron.launch import environment
from tests.tools.slurm.job import TINY


@pytest.fixture
def job(tmp_path):
    """`cp-ring train` and what follows it, for a job that is far from its end when a test has seen
    some steps.
    """
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(TINY | {"launch": {"device": "cpu", "run_dir": str(tmp_path / "run")}})
    )
    settings = (
        "parallel.context_parallel_size=2",
        "megatron.save_interval=20",
        "megatron.train_iters=100000",
    )
    return [
        sys.executable,
        "-m",
        "cp_ring.tools",
        "train",
        str(path),
        *(word for one in settings for word in ("--set", one)),
    ]


def until(happened, timeout_s=LIMIT_S):
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def interrupted(line, run_dir, kill_a_rank=False):
    """Runs `line` in its own process group, sends SIGINT to the group after a few steps; returns
    its output and its exit code.

    With `kill_a_rank`, one rank is killed before, when the first checkpoint is there, and the job
    has started again.
    """
    with subprocess.Popen(
        line,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        text = []
        reader = threading.Thread(target=lambda: text.append(run.stdout.read()))
        reader.start()
        try:
            until(lambda: run.poll() is not None or len(progress.read(run_dir)) >= 3)
            if kill_a_rank:
                until(lambda: run.poll() is not None or len(progress.read(run_dir)) >= 25)
                first = ranks(run)
                assert len(first) == 2
                first[0].send_signal(signal.SIGKILL)
                psutil.wait_procs(first, timeout=LIMIT_S)
                done = len(progress.read(run_dir))
                until(lambda: run.poll() is not None or len(progress.read(run_dir)) >= done + 3)
            processes = psutil.Process(run.pid).children(recursive=True)
            os.killpg(run.pid, signal.SIGINT)
            run.wait(timeout=LIMIT_S)
        finally:
            for process in (
                psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
            ):
                process.kill()
            run.kill()
            reader.join()
    assert not [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    return text[0], run.returncode


def ranks(launcher):
    lines = [
        (process, process.cmdline())
        for process in psutil.Process(launcher.pid).children(recursive=True)
    ]
    return [process for process, line in lines if "cp_ring.pretrain_gpt" in line]


def saved(run_dir):
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.ci
def test_a_lost_rank_then_ctrl_c(job, tmp_path):
    text, code = interrupted(
        [*job, "--set", "launch.max_restarts=1"], tmp_path / "run", kill_a_rank=True
    )
    assert code == 128 + signal.SIGTERM, text
    lines = progress.read(tmp_path / "run")
    numbers = [line["step"] for line in lines]
    again = next(i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1])
    assert numbers[again] % 20 == 1 and numbers[again] > 20, "it went on behind the last checkpoint"
    losses = {}
    for line in lines:  # what was done twice had the same loss twice
        assert abs(losses.setdefault(line["step"], line["lm loss"]) - line["lm loss"]) <= 1e-6
    assert sorted(losses) == list(range(1, max(numbers) + 1))
    step = numbers[-1]
    assert saved(tmp_path / "run") == step >= 3
    assert "cp_ring: Ctrl-C: the job saves and then ends; Ctrl-C again ends it at once" in text
    assert re.search(rf"cp_ring: step {step}: .*; to go on: .*train", text.splitlines()[-1])
    assert "Traceback" not in text and not (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_torchrun(job, tmp_path):
    shown = subprocess.check_output(
        [*job, "--dry-run"], env=environment(), text=True, stderr=subprocess.DEVNULL
    )
    text, code = interrupted(shlex.split(shown), tmp_path / "run")
    assert code == 1  # torchrun's own
    assert saved(tmp_path / "run") == progress.read(tmp_path / "run")[-1]["step"] >= 3
    assert (
        "cp_ring: SIGINT: saving, then ending with exit code 0; the same command resumes from there"
        in text
    )
    assert not re.search(r"\[?rank.?\d.*KeyboardInterrupt", text)


def test_second_ctrl_c_kills_the_ranks():
    """A rank that does not react to SIGTERM, below a process between it and the launcher.

    The launcher is a fork of this process: it ends all its children, and those of this process
    serve other tests.
    """
    launcher = os.fork()
    if not launcher:
        code = 1
        try:
            interrupt_twice()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == 0


def test_temporary_files_of_killed_ranks_are_removed(monkeypatch):
    """Not in a folder so long that sockets have no names in one below it."""
    rank = "import os, tempfile; print(tempfile.mkdtemp('wandb-media'), flush=True); os._exit(9)"
    wanted = {"PET_SIGNALS_TO_HANDLE": "SIGINT,SIGTERM"}
    with tempfile.TemporaryDirectory() as short:
        for place in (Path(short), Path(short, "x" * 50)):
            place.mkdir(exist_ok=True)
            monkeypatch.setattr(tempfile, "tempdir", str(place))
            monkeypatch.setenv("TMPDIR", str(place))
            before = dict(os.environ)
            with _environment(wanted):
                assert os.environ["PET_SIGNALS_TO_HANDLE"] == "SIGTERM"
                done = subprocess.run([sys.executable, "-c", rank], stdout=-1, text=True)
            made = Path(done.stdout.strip())
            assert done.returncode == 9 and made.name.endswith("wandb-media")
            assert dict(os.environ) == before
            left = [path.name for path in place.iterdir()]
            assert left == ([made.name] if made.parent == place else [])
            assert (made.parent == place) == (len(str(place)) > 50)


def interrupt_twice():
    from torch.distributed.elastic.multiprocessing.api import SignalException

    said = []

    class Output:
        announce = said.append

    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', "
        "flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as rank:
        assert rank.stdout.readline() == b"ready\n"
        interrupts = _Interrupts(Output())
        with interrupts.handled():
            with pytest.raises(SignalException) as stop:
                os.kill(os.getpid(), signal.SIGINT)
            assert stop.value.sigval == signal.SIGTERM
            rank.send_signal(signal.SIGTERM)
            assert rank.poll() is None
            os.kill(os.getpid(), signal.SIGINT)
        assert rank.wait(timeout=LIMIT_S) == -signal.SIGKILL
    assert len(said) == 2 and interrupts.count == 2
