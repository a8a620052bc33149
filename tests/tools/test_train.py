"""`cp-ring train` from end to end: a tiny job on two ranks, then resumed on one."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.rank_pool import LIMIT_S

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


def run(folder, line):
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


def train(folder, settings, *more):
    """`cp-ring train quickstart` in `folder` with these settings."""
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return run(
        folder, [sys.executable, "-m", "cp_ring.tools", "train", "quickstart", *overrides, *more]
    )


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


def losses_of(output):
    """Step number to loss, from the lines that Megatron prints."""
    found = re.findall(r"iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+)", output)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.ci
def test_a_new_user(folder):
    """Train, and resume at another size by the printed command line."""
    settings = TINY | {"megatron.train_iters": 3, "megatron.context_parallel_size": 2}
    first = train(folder, settings)
    assert first.returncode == 0, first.stderr[-4000:]
    assert list(steps(first.stdout)) == [1, 2, 3]
    assert "validation loss at iteration 3 on validation set" in first.stdout
    assert len(re.findall(r"^step \d/3 \| ms \S+ \|", first.stdout, re.MULTILINE)) == 3
    assert len(first.stdout.splitlines()) <= 14, first.stdout
    assert all(line.startswith("cp_ring: ") for line in first.stderr.splitlines()), first.stderr
    (file,) = (folder / "out" / "logs").glob("train-*.log")
    log = file.read_text()
    assert len(log.splitlines()) > 800 and "number of layers" not in first.stdout
    for words in ("[rank 0]   hidden_size ....", "[rank 1]  [20", "iteration        3/       3"):
        assert words in log, words
    (name,) = re.findall(r"cp_ring: the output of all ranks goes to (\S+);", first.stdout)
    assert folder / name == file
    closing = first.stdout.splitlines()[-1]
    assert closing.startswith(
        f"cp_ring: step 3: checkpoints and tensorboard are in {folder / 'out'}; "
    )
    assert list((folder / "out" / "tensorboard").glob("events.*"))
    (corpus,) = (folder / "corpora").iterdir()
    built = (corpus / "train.bin").stat().st_mtime_ns

    settings |= {"megatron.train_iters": 5, "megatron.context_parallel_size": 1}
    shown = train(folder, settings, "--print-flags")
    (folder / "by_hand.sh").write_text(shown.stdout)
    by_hand = run(folder, ["bash", "by_hand.sh"])
    assert by_hand.returncode == 0, shown.stderr + by_hand.stdout + by_hand.stderr
    assert list(losses_of(by_hand.stdout)) == [4, 5]
    assert (folder / "out" / "checkpoints" / "iter_0000005").is_dir()
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
