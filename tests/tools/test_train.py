"""`cp-ring train` from end to end: a tiny job on two ranks that Ctrl-C ends, then resumed on one."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from tests.rank_pool import LIMIT_S, python

TINY = {
    "megatron.num_layers": 1,
    "megatron.hidden_size": 32,
    "megatron.ffn_hidden_size": 64,
    "megatron.num_attention_heads": 2,
    "megatron.num_query_groups": 1,
    "megatron.seq_length": 64,
    "megatron.max_position_embeddings": 64,
    "megatron.eval_iters": 1,
    "data.vocab_size": 300,
    "launch.device": "cpu",
    "launch.run_dir": "out",
    "data.cache": "corpora",
    "data.path": "texts",
}


def line(settings):
    """The command line of `cp-ring train quickstart` with these settings."""
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["-m", "cp_ring.tools", "train", "quickstart", *overrides]


def train(folder, settings):
    """Runs it in `folder`."""
    return python(*line(settings), cwd=folder)


def steps(output):
    """Step number to loss, from the lines that a run printed."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step (\d+)/.*\| lm loss (\S+)", output, re.MULTILINE)
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(12):
        words = " ".join(f"word{(index * 7 + i) % 50}" for i in range(200))
        (tmp_path / "texts" / f"{index}.txt").write_text(words)
    return tmp_path


def closing(folder, step):
    """The last line that a run shows."""
    return (
        f"cp_ring: step {step}: checkpoints and tensorboard are in {folder / 'out'}; the same "
        "command goes on from there"
    )


def interrupted(folder, settings):
    """Ctrl-C after step 3 of a job, and a second job in its directory before: the exit code of the
    first, both of its outputs, the processes that are left, and what came of the second.
    """
    shown = []
    with (folder / "told").open("w") as told, subprocess.Popen(
        [sys.executable, *line(settings)], cwd=folder, stdout=subprocess.PIPE, stderr=told,
        text=True,
        start_new_session=True,
    ) as job:  # fmt: skip
        reader = threading.Thread(target=lambda: shown.extend(job.stdout))
        reader.start()
        end = time.monotonic() + LIMIT_S
        while job.poll() is None and not any("step 3/" in text for text in shown):
            assert time.monotonic() < end
            time.sleep(0.05)
        second = train(folder, settings)
        processes = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGINT)
        job.wait(timeout=LIMIT_S)
        reader.join()
    running = [process for process in processes if process.is_running()]
    left = [each for each in running if each.status() != psutil.STATUS_ZOMBIE]
    return job.returncode, "".join(shown), (folder / "told").read_text(), left, second


@pytest.mark.ci
def test_a_new_user(folder):
    """Train, end with Ctrl-C, and go on at another size to the end."""
    code, shown, told, left, second = interrupted(
        folder,
        TINY
        | {
            "megatron.train_iters": 100000,
            "megatron.context_parallel_size": 2,
            "megatron.num_workers": 2,
            # no further lines, however many steps it makes until then
            "megatron.save_interval": 100000,
            "megatron.eval_interval": 100000,
            "cp_ring.timing": 0,
        },
    )
    assert code == 128 + signal.SIGINT, shown + told
    assert not left and "Traceback" not in shown
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1] == (
        "cp_ring: error: launch.run_dir out: another job is running there: end it, or give another "
        "launch.run_dir"
    )
    saved = int((folder / "out/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved >= 3 and [*steps(shown)] == [*range(1, saved + 1)]
    assert len(re.findall(r"^step \d+/100000 \| ms \S+ \|", shown, re.MULTILINE)) == saved
    assert "; Ctrl-C saves and ends, a second one ends without saving" in shown
    assert len(shown.splitlines()) <= 11 + saved, shown
    assert all(line.startswith("cp_ring: ") for line in told.splitlines()), told
    assert shown.splitlines()[-1] == closing(folder, saved)
    (file,) = (folder / "out" / "logs").glob("train-*.log")
    log = file.read_text()
    assert len(log.splitlines()) > 800 and "number of layers" not in shown
    for words in ("[rank 0]   hidden_size ....", "[rank 1]  [20", "iteration        3/  100000"):
        assert words in log, words
    (name,) = re.findall(r"cp_ring: the output of all ranks goes to (\S+);", shown)
    assert folder / name == file
    (corpus,) = (folder / "corpora").iterdir()
    built = (corpus / "train.bin").stat().st_mtime_ns

    last = saved + 2
    settings = {"megatron.train_iters": last, "megatron.context_parallel_size": 1}
    done = train(folder, TINY | settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"cp_ring: resuming from step {saved}" in done.stdout
    assert [*steps(done.stdout)] == [saved + 1, last]
    assert f"validation loss at iteration {last} on validation set" in done.stdout
    assert done.stdout.splitlines()[-1] == closing(folder, last)
    assert list((folder / "out" / "tensorboard").glob("events.*"))
    assert (folder / "out" / "checkpoints" / f"iter_{last:07}").is_dir()
    assert (corpus / "train.bin").stat().st_mtime_ns == built
    assert list((folder / "corpora").iterdir()) == [corpus]


@pytest.mark.slow
def test_the_certificate_alone(folder):
    settings = {"cp_ring.certify": "only", "megatron.context_parallel_size": 2}
    done = train(folder, TINY | settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "probes passed" in done.stdout and "nothing is trained" in done.stdout
    assert not steps(done.stdout) and not (folder / "out" / "checkpoints" / "iter_0000001").exists()


@pytest.mark.slow
def test_the_loss_of_the_quickstart_falls_smoothly(tmp_path):
    settings = {"megatron.train_iters": 25, "megatron.context_parallel_size": 1}
    done = train(tmp_path, settings | {"cp_ring.certify": "off"})
    losses = list(steps(done.stdout).values())
    assert len(losses) == 25, done.stderr
    least = np.minimum.accumulate(losses)
    assert losses[-1] < 4.6 and max(losses - least) < 0.5, losses
