"""A rank that fails ends soon, and so does its job, with its own traceback or line on the console,
wherever it fails and whatever its workers, threads and messages wait for.
"""

import json
import subprocess
import sys

import pytest

from tests.megatron.launch import HERE, RING, TINY, environment
from tests.rank_pool import LIMIT_S

SCRIPT = str(HERE / "failing_script.py")
STEPS = ["--train-iters", "3", "--log-interval", "1", "--calculate-per-token-loss"]
WORKERS = ["--num-workers", "2"]
LISTENS = ["--exit-signal-handler"]
EVALUATES = ["--eval-iters", "1", "--eval-interval", "2"]
SAVES = ["--save", "checkpoints", "--save-interval", "2", "--ckpt-format", "torch_dist"]

CASES = {
    "start:1": LISTENS,
    "data:1": [*WORKERS, *LISTENS],
    "forward:1": WORKERS,
    "backward:all": [*WORKERS, *LISTENS],
    "evaluation:0": [*LISTENS, *EVALUATES],
    "save:1": [*WORKERS, *LISTENS, *SAVES],
    "end:all": [*WORKERS, *LISTENS],
    "exit:1": [*WORKERS, *LISTENS],
    "entry:0": [*WORKERS, *LISTENS],
    "program:1": [],
    "sleep:0": [*WORKERS, *LISTENS, "--cp-ring-hop-timeout", "600"],
}
DEFAULT = ("data:1", "backward:all", "save:1", "exit:1", "sleep:0")
"""Those that run by default; the others are slow."""


def end(folder, names):
    """How the cases end, by name."""
    cases = [
        {
            "name": name.replace(":", "-"),
            "argv": [*_entry(name), *TINY, *STEPS, *CASES[name], *RING],
            "environment": {"FAILS": name},
        }
        for name in names
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    subprocess.run(
        [sys.executable, "-m", "tests.megatron.failing_ranks", "cases.json"],
        cwd=folder,
        env=environment() | {"PYTHONPATH": str(HERE.parents[1])},
        timeout=LIMIT_S * len(cases),
        check=True,
    )
    ended = map(json.loads, (folder / "ended.jsonl").read_text().splitlines())
    found = {line["name"].replace("-", ":"): line for line in ended}
    for line in found.values():
        texts = [(folder / f"{line['name']}.{rank}.txt").read_text() for rank in (0, 1)]
        line["texts"] = texts
    return found


def _entry(name):
    """A script, the entry of `cp-ring train`, or a program with `enable`."""
    other = name.startswith(("entry:", "program:"))
    return ["tests.megatron.failing_entry"] if other else ["cp_ring.run", SCRIPT]


def check(name, ended):
    texts = "\n".join(ended["texts"])
    assert not ended["hung"], texts
    place, _, who = name.partition(":")
    if place == "exit":
        assert ended["codes"][1] == 3, texts
        assert "cp_ring: error: rank 1: failing_script.py ended with exit code 3" in texts
    elif place == "sleep":
        assert ended["codes"] == [3, 1], texts
        assert "rank 0 ends, because another has failed: rank 1: ValueError: my own bug" in texts
    else:
        for rank in range(2):
            if who in (str(rank), "all"):
                text = ended["texts"][rank]
                # of all ranks that fail, torchrun may end one before it has said so
                assert ended["codes"][rank] == 1 or who == "all", text
                assert "Traceback" in texts and f"ValueError: my own bug in {place}" in texts


@pytest.mark.parametrize(
    "names",
    [
        DEFAULT,
        pytest.param([name for name in CASES if name not in DEFAULT], marks=pytest.mark.slow),
    ],
    ids=["by default", "elsewhere"],
)
def test_a_rank_that_fails_ends_its_job_wherever_it_fails(tmp_path, names):
    for name, ended in end(tmp_path, names).items():
        check(name, ended)
