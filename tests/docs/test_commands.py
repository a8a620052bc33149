"""Every other command of a bash block of README.md and docs/ is run as printed, or is set-up of this
machine; `test_snippets.py` runs `cp-ring plan`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.test_snippets import ROOT, blocks
from tests.megatron import conversations
from tests.megatron.launch import HERE, environment
from tests.rank_pool import LIMIT_S

pytestmark = pytest.mark.ci
SETUP = ("bash launch/", "source .venv", "pip install", "pre-commit", "git clone", "cd Megatron-LM")
ELSEWHERE = {  # run by other tests, and on other machines
    "cp-ring plan": "test_snippets.py",
    "sbatch ": "tests/tools/slurm",
    "python -m tests.parity": "tests/parity",
}


def commands(page=None):
    """(page, line) of the commands of all bash blocks."""
    for path, found in blocks("bash"):
        if page in (None, path.name):
            for line in found["code"].replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield path.name, shlex.join(words)


def shown(page, start):
    """The command of the page that begins with `start`."""
    (found,) = [line for _, line in commands(page) if line.startswith(start)]
    return found


def run(line, folder):
    """Runs a command line of the docs in `folder`, with this Python's programs."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    line = re.sub(r"^cp-ring ", f"{shlex.quote(sys.executable)} -m cp_ring.tools ", line)
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment() | {"PATH": programs},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}"
    return done.stdout


def losses(output):
    return [float(loss) for loss in re.findall(r"lm loss:? (\d\S+) \|", output)]


ON_CPU = "torchrun --nproc-per-node 2"


def test_the_script_of_a_checkout(tmp_path, pytestconfig):
    """README.md's command, with a script of Megatron's kind, and with a checkout that is given."""
    line = shown("README.md", ON_CPU)
    shutil.copy(HERE / "small_script.py", tmp_path / "pretrain_gpt.py")
    for folder in filter(None, (tmp_path, pytestconfig.getoption("--megatron-lm"))):
        output = run(line, folder)
        assert "probes passed" in output, output
        found = losses(output)
        assert len(found) == 10 and found[0] - found[9] > 0.3


@pytest.mark.slow
def test_fine_tuning_on_few_conversations(tmp_path):
    file, tokenizer = conversations.write(tmp_path, most=40)
    file.rename(tmp_path / "talks.jsonl")
    tokenizer.rename(tmp_path / "FOLDER")
    output = run(shown("documents.md", ON_CPU), tmp_path)
    assert "cp_ring: test: --split 969, 30, 1 leaves it no conversation" in output
    assert "validation set" in output and len(losses(output)) == 10


def test_own_texts_by_a_yaml_file(tmp_path):
    """What it trains with; `tests/tools/test_train.py` trains on such texts."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (text,) = re.findall(r"^```yaml\n(data:.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(text)
    texts = [
        f'{{"text": "{" ".join(f"word{i * k % 97}" for i in range(300))}"}}\n' for k in range(60)
    ]
    (tmp_path / "my.jsonl").write_text("".join(texts))
    command = shown("quickstart.md", "cp-ring train my.yaml")
    flags = run(f"{command} --print-flags", tmp_path).split()
    for data in ("train", "valid"):
        prefix = flags[flags.index(f"--{data}-data-path") + 1]
        assert Path(f"{prefix}.bin").stat().st_size
    for name, value in yaml.safe_load(text)["megatron"].items():
        at = flags.index("--" + name.replace("_", "-"))
        assert value is True or yaml.safe_load(flags[at + 1]) == value, name
    assert "--cp-ring" in flags


@pytest.mark.slow
def test_what_tune_writes_is_a_job(tmp_path):
    run(shown("tune.md", "cp-ring tune llama3-8b-128k"), tmp_path)
    assert (tmp_path / "my.yaml").read_text().startswith("# Made by cp-ring tune")


def test_every_command_is_known():
    run_here = (ON_CPU, "cp-ring train my.yaml", "cp-ring tune llama3-8b-128k")
    known = (*SETUP, *ELSEWHERE, *run_here)
    left = [(page, line) for page, line in commands() if not line.startswith(known)]
    # of eight GPUs (tests/tools/test_configs.py), and with a data loader of one's own
    assert [page for page, _ in left] == ["megatron.md"] * 2, left
