"""`cp-ring train` from end to end: a tiny job on two ranks, then resumed on one."""

import re
import subprocess
import sys

import pytest
import yaml

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


def train(folder, **settings):
    return command("train", folder, TINY | settings)


def command(name, folder, settings):
    """`cp-ring name quickstart` in `folder` with these settings."""
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return subprocess.run(
        [sys.executable, "-m", "cp_ring.cli", name, "quickstart", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def steps(output):
    """Step number to loss, from the lines that a run printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+ \| lm loss (\S+) \|", output, re.MULTILINE)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(12):
        words = " ".join(f"word{(index * 7 + i) % 50}" for i in range(200))
        (tmp_path / "texts" / f"{index}.txt").write_text(words)
    return tmp_path


def test_train_and_resume_at_another_size(folder):
    first = train(folder, **{"megatron.train_iters": 3, "parallel.context_parallel_size": 2})
    assert first.returncode == 0, first.stderr[-4000:]
    assert list(steps(first.stdout)) == [1, 2, 3]
    assert "validation loss at iteration 3 on validation set" in first.stdout
    assert re.search(r"tokens/s \| \S+ GiB per rank", first.stdout)
    closing = first.stdout.splitlines()[-1]
    assert closing.startswith("cp_ring: step 3: checkpoints, tensorboard and job.yaml are in out; to go on: cp-ring train")
    assert (folder / "out" / "checkpoints" / "iter_0000003").is_dir()
    assert list((folder / "out" / "tensorboard").glob("events.*"))
    assert yaml.safe_load((folder / "out" / "job.yaml").read_text())["parallel"]["context_parallel_size"] == 2
    (corpus,) = (folder / "corpora").iterdir()
    built = (corpus / "train.bin").stat().st_mtime_ns

    second = train(folder, **{"megatron.train_iters": 5, "parallel.context_parallel_size": 1})
    assert second.returncode == 0, second.stderr[-4000:]
    assert "cp_ring: resuming from step 3 of 5" in second.stdout
    assert list(steps(second.stdout)) == [4, 5]
    assert (folder / "out" / "checkpoints" / "iter_0000005").is_dir()
    assert (corpus / "train.bin").stat().st_mtime_ns == built and list((folder / "corpora").iterdir()) == [corpus]


def test_failure_of_a_rank_is_the_exit_code(folder):
    done = train(folder, **{"megatron.train_iters": 1, "megatron.make_vocab_size_divisible_by": 0})
    assert done.returncode == 1
    assert "cp_ring: error: rank " in done.stderr and "ended with exit code 1" in done.stderr
